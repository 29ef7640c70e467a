"""How a checkpoint embeds sentences: the files of sentence-transformers, read and checked.

Format: https://sbert.net (``modules.json``, ``1_Pooling/config.json``, ``sentence_bert_config.json``,
``config_sentence_transformers.json``).  A checkpoint without them is pooled by the mean, as sentence-transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import read_json_file
from rtp_llm.checkpoint.config_json import MAX_JSON_BYTES
from rtp_llm.checkpoint.files import open_regular, parse_object, read_exactly
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.layers.pooling import POOLINGS
from rtp_llm.runtime.faults import RuntimeFault

#: The older spelling: one flag for each mode.
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

#: Sequences of modules, by the last part of their types, that mean something here.
_CHAINS = (("Transformer",), ("Transformer", "Pooling"), ("Transformer", "Normalize"), ("Transformer", "Pooling", "Normalize"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to embed a text: put ``prompt`` before it, make it lower case if ``lower_case``, cut it to ``max_seq_length`` tokens
    (None: the model's most), pool by ``mode``, and scale the vector to length 1 if ``normalize``."""

    mode: str = "mean"
    normalize: bool = False
    max_seq_length: int | None = None
    lower_case: bool = False
    prompt: str = ""


def read_recipe(directory: str | Path) -> Recipe:
    """The recipe that the checkpoint's files give.

    Raises:
        CheckpointError: a file that is there and is not JSON.
        ConfigError: ``BAD_POOLING``, with everything in the files that is not supported.
    """
    problems: list[Problem] = []
    normalize, folder = _modules(Path(directory), problems)
    pooling = (read_json_file(directory, f"{folder}/config.json") or {}) if folder else {}
    bert = read_json_file(directory, "sentence_bert_config.json") or {}
    texts = read_json_file(directory, "config_sentence_transformers.json") or {}
    prompt = _prompt(texts, problems)
    if prompt and pooling.get("include_prompt") is False:
        problems.append(_problem(f"{folder}/config.json", "a prompt that is not pooled", "include_prompt true", "false"))
    recipe = Recipe(_mode(pooling, folder, problems), normalize, _length(bert, problems), _lower(bert, problems), prompt)
    if problems:
        raise ConfigError(problems)
    return recipe


def _problem(file: str, what: str, expected: str, actual: str) -> Problem:
    fix = "use sentence-transformers for this checkpoint, or change the file"
    return Problem(RuntimeFault.BAD_POOLING, what, file=file, expected=expected, actual=actual[:200], fix=fix)


def _modules(directory: Path, problems: list[Problem]) -> tuple[bool, str | None]:
    """Whether vectors are normalised, and the folder of the pooling's file."""
    modules = list(_module_list(directory, problems))
    kinds = tuple(kind for kind, _ in modules)
    if modules and kinds not in _CHAINS:
        problems.append(_problem("modules.json", "modules that cannot be run", " or ".join(map(", ".join, _CHAINS)), ", ".join(kinds)))
    folders = [path for kind, path in modules if kind == "Pooling"]
    if folders and not re.fullmatch(r"[0-9]{1,2}_[A-Za-z]{1,32}", folders[0]):
        # An untrusted path is not followed.
        problems.append(_problem("modules.json", "an unusual path of the pooling module", "e.g. 1_Pooling", repr(folders[0])))
        return False, None
    # Without modules.json, sentence-transformers' usual folder may still be there.
    return "Normalize" in kinds, folders[0] if folders else None if modules else "1_Pooling"


def _module_list(directory: Path, problems: list[Problem]) -> Iterator[tuple[str, str]]:
    path = directory / "modules.json"
    if not path.exists() and not path.is_symlink():
        return
    with open_regular(path, "modules.json") as (fd, size):
        raw = read_exactly(fd, min(size, MAX_JSON_BYTES), 0)
    # The file is a list, but parse_object takes objects.
    entries = parse_object(b'{"modules": %s}' % raw, "modules.json")["modules"]
    for entry in entries if isinstance(entries, list) else [entries]:
        if isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path"), str):
            yield entry["type"].rpartition(".")[2], entry["path"]
        else:
            problems.append(_problem("modules.json", "an entry that is no module", "type and path", repr(entry)))


def _mode(pooling: Mapping[str, Any], folder: str | None, problems: list[Problem]) -> str:
    modes = pooling.get("pooling_mode")
    if modes is None:
        flags = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
        modes = [_FLAGS.get(name, name) for name in flags] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if isinstance(modes, list) and len(modes) == 1 and isinstance(modes[0], str) and modes[0] in POOLINGS:
        return modes[0]
    problems.append(_problem(f"{folder}/config.json", "a way of pooling that is not there", f"one of {', '.join(POOLINGS)}", repr(modes)))
    return "mean"


def _length(bert: Mapping[str, Any], problems: list[Problem]) -> int | None:
    value = bert.get("max_seq_length")
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    problems.append(_problem("sentence_bert_config.json", "max_seq_length is no length", "a whole number above 0", repr(value)))
    return None


def _lower(bert: Mapping[str, Any], problems: list[Problem]) -> bool:
    value = bert.get("do_lower_case", False)
    if not isinstance(value, bool):
        problems.append(_problem("sentence_bert_config.json", "do_lower_case is neither true nor false", "true or false", repr(value)))
    return value is True


def _prompt(texts: Mapping[str, Any], problems: list[Problem]) -> str:
    name, prompts = texts.get("default_prompt_name"), texts.get("prompts")
    if name is None:
        return ""
    if isinstance(name, str) and isinstance(prompts, dict) and isinstance(prompts.get(name), str):
        return str(prompts[name])
    file = "config_sentence_transformers.json"
    problems.append(_problem(file, "default_prompt_name names no prompt", "a key of prompts", repr(name)))
    return ""
