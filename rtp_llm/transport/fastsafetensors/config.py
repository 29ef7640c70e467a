"""The effective configuration of fastsafetensors, resolved once, before the package is imported.

The package's own settings come as a JSON file or as text, in the form that it documents.  They are read here because it looks
for its file in the environment, takes no inline text, and is used by its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtp_llm.config import ConfigFault, LoadConfig
from rtp_llm.errors import ConfigError, Problem

if TYPE_CHECKING:
    import torch

#: Where the package looks when it is given no file.
DEFAULT_FILE = "fastsafetensors.json"
#: Bytes of one chunk where its settings name none.  Two are on the device at a time; larger ones do not read faster
#: (benchmark/fastsafetensors.md).
CHUNK_BYTES = 256 << 20
#: Most chunks of one rank: if parameters use up the budget, the preflight refuses at once, and no load goes byte by byte.
_MOST_CHUNKS = 10_000
#: Queue size where its settings name none: one chunk is read while another one is placed.
QUEUE_SIZE = 0
#: Sections with settings of the loader itself; other sections are a copier's.
_FLAT = ("parallel", "debug", "copy")
#: Settings that each loader takes from the top level, whatever its section says.
_COMMON = ("framework", "debug_log", "set_numa", "disable_cache")


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """The configuration of one load.

    ``source``: where it came from.  ``copier``: ``nogds``, ``gds``, ``fgds``, or the loader's own.  ``queue_size``: -1 for one
    chunk at a time, 0 for a second one that is read meanwhile, n > 0 for n more.  ``copier_options``: passed on unchanged.
    ``direct``: None where each file's share in the page cache decides.
    """

    source: str = "defaults"
    loader: str = "base"
    copier: str = "gds"
    queue_size: int = QUEUE_SIZE
    chunk_bytes: int = CHUNK_BYTES
    device_memory_budget: int | None = None
    set_numa: bool = True
    debug_log: bool = False
    copier_options: tuple[tuple[str, Any], ...] = ()
    direct: bool | None = None

    @property
    def depth(self) -> int:
        """Chunks on the device at a time."""
        return 1 if self.queue_size < 0 else self.queue_size + 2

    def chunk_for(self, bytes_resident: int) -> int:
        """Bytes of a chunk: at most what the budget leaves beside the parameters."""
        if self.device_memory_budget is None:
            return self.chunk_bytes
        least = bytes_resident // _MOST_CHUNKS + 1
        return min(self.chunk_bytes, max(least, (self.device_memory_budget - bytes_resident) // self.depth))


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """What every use of the package needs.

    ``threads``: the package's.  ``direct``: for each file whether to read it around the page cache; the package decides for others.
    """

    directory: str
    device: torch.device
    config: EffectiveConfig
    threads: int
    direct: Mapping[str, bool]


def _whole(least: int) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _optional_whole(value: object) -> bool:
    return value is None or _whole(1)(value)


def _is_bool(value: object) -> bool:
    return isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


#: Known settings: what each must be, and its test.  All others are left to the package.
_KNOWN: dict[str, tuple[str, Callable[[object], bool]]] = {
    "loader": ("text", _is_text),
    "framework": ('"pytorch"', lambda value: value == "pytorch"),
    "debug_log": ("true or false", _is_bool),
    "set_numa": ("true or false", _is_bool),
    "disable_cache": ("true or false", _is_bool),
    "use_pipeline": ("true or false", _is_bool),
    "use_tqdm_on_load": ("true or false", _is_bool),
    "use_chunk_budget_as_allocation_size": ("true or false", _is_bool),
    "max_concurrent_producers": ("1", lambda value: value == 1 and not isinstance(value, bool)),
    "queue_size": ("whole number, at least -1", _whole(-1)),
    "max_batch_bytes": ("whole number of bytes, above 0, or null", _optional_whole),
    "device_memory_budget": ("whole number of bytes, above 0, or null", _optional_whole),
}


def effective(load: LoadConfig, directory: Path | None = None) -> EffectiveConfig:
    """The configuration by the settings: inline text, else the named file, else ``fastsafetensors.json`` in
    ``directory`` (the working directory unless given), else the defaults.

    Raises:
        ConfigError: a missing file, or one without a JSON object; every wrong member at once.
    """
    source, text = _text(load, directory or Path())
    direct = {"1": True, "0": False}.get(load.fastsafetensors_odirect)
    if text is None:
        return EffectiveConfig(copier="nogds" if load.fastsafetensors_nogds else "gds", direct=direct)
    flat, sections, problems = _members(_object(text, source), source)
    section = dict(sections.get(str(flat.get("loader", "base")), {}))
    copier = section.pop("copier_type", "gds")
    if not _is_text(copier):
        problems.append(_bad("copier_type", "text", copier, source))
    if problems:
        raise ConfigError(problems)
    pipelined = flat.get("use_pipeline", False)
    return EffectiveConfig(
        source=source,
        loader=flat.get("loader", "base"),
        copier="nogds" if load.fastsafetensors_nogds else copier,
        queue_size=flat.get("queue_size", 0) if pipelined else -1,
        chunk_bytes=flat.get("max_batch_bytes") or CHUNK_BYTES,
        device_memory_budget=flat.get("device_memory_budget"),
        set_numa=flat.get("set_numa", True),
        debug_log=flat.get("debug_log", False),
        copier_options=tuple((k, v) for k, v in sorted(section.items()) if k not in _COMMON),
        direct=direct,
    )


def _text(load: LoadConfig, directory: Path) -> tuple[str, str | None]:
    if load.fastsafetensors_config_json is not None:
        return "FASTSAFETENSORS_CONFIG_JSON", load.fastsafetensors_config_json
    named = load.fastsafetensors_config
    path = directory / (named or DEFAULT_FILE)
    if named is None and not path.is_file():
        return "defaults", None
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        what = f"the settings of fastsafetensors cannot be read: {reason}"
        raise ConfigError(Problem(ConfigFault.BAD_VALUE, what, file=str(path), expected="a JSON file", actual="none")) from error


def _object(text: str, source: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        what = "the settings of fastsafetensors are not a JSON object"
        raise ConfigError(Problem(ConfigFault.BAD_VALUE, what, file=source, expected="{...}", actual=f"{text[:60]!r}"))
    return found


def _members(data: Mapping[str, Any], source: str) -> tuple[dict[str, Any], dict[str, Mapping[str, Any]], list[Problem]]:
    """The settings of the loader itself, the other sections, and the problems."""
    flat: dict[str, Any] = {}
    sections: dict[str, Mapping[str, Any]] = {}
    for name, value in data.items():
        if isinstance(value, dict) and name in _FLAT:
            flat.update(value)
        elif isinstance(value, dict) and name not in _KNOWN:
            sections[name] = value
        else:
            flat[name] = value
    wrong = [_bad(name, _KNOWN[name][0], value, source) for name, value in flat.items() if name in _KNOWN and not _KNOWN[name][1](value)]
    return flat, sections, wrong


def _bad(name: str, expected: str, value: object, source: str) -> Problem:
    what = f"this value of fastsafetensors' setting {name} is not allowed"
    return Problem(ConfigFault.BAD_VALUE, what, file=source, expected=expected, actual=repr(value)[:60])
