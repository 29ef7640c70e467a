"""What the installed fastsafetensors can do, judged by its callables, never by its version."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

from rtp_llm.installed import Broken, NotInstalled, accepts, demands, imported, parameters

PACKAGE = "fastsafetensors"


class Tier(IntEnum):
    """What a wheel is good for; a higher one can do all that a lower one can."""

    ABSENT = 0  # not installed
    UNUSABLE = 1  # installed, and its import fails
    TOO_OLD = 2  # importable, without an AutoLoader that can be called
    WHOLE = 3  # AutoLoader (0.3.3, 0.4.0): tensors arrive whole, and a file at a time stands on the device
    BOUNDED = 4  # (0.5.0) and the parts that AutoLoader is made of: any range of a file arrives, in chunks


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the package can do; ``reason``: why not more.

    ``copyout_filter``, ``stacked_split`` and ``estimate`` are extensions of some wheels: names of keyword parameters of
    AutoLoader (``estimate``: of an attribute); None where the wheel has none.
    """

    tier: Tier
    reason: str
    copyout_filter: str | None = None
    stacked_split: str | None = None
    estimate: str | None = None


#: AutoLoader's extensions: the names of each, the newest first.
_FILTERS = ("local_copyout_filter",)
_SPLITS = ("stacked_moe_tensors", "dim0_split_templates")
_ESTIMATE = "estimated_peak_device_bytes"

#: The parts that AutoLoader is made of, and the keywords by which they are called here.
_PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("parallel_loader", "PipelineParallel", ("pg", "loader", "hf_weights_files", "queue_size", "use_tqdm_on_load", "overlap_io")),
    ("parallel_loader", "PipelineParallel", ("borrowed_tensors", "accumulate_resident")),
    ("loader", "BaseSafeTensorsFileLoader", ("pg", "device", "copier_type", "set_numa", "framework")),
    ("common", "SafeTensorsMetadata", ("string", "header_length", "size_bytes", "framework", "src")),
    ("frameworks", "get_framework_op", ("name",)),
)


def absent() -> str:
    """Why the package is absent; empty where it is installed, whatever its state.  Imports nothing."""
    try:
        return "" if importlib.util.find_spec(PACKAGE) is not None else f"{PACKAGE} is not installed"
    except ValueError:  # a module without a specification: strange, but not absent
        return ""


def probe() -> Capabilities:
    """Imports and inspects the package.  Never raises for one that is absent, broken or strange."""
    try:
        module = imported(PACKAGE)
    except NotInstalled as lack:
        return Capabilities(Tier.ABSENT, str(lack))
    except Broken as broken:
        return Capabilities(Tier.UNUSABLE, str(broken))
    return look_at(module)


def look_at(module: ModuleType) -> Capabilities:
    """The capabilities of an imported package."""
    auto = getattr(module, "AutoLoader", None)
    lack = _lacks_auto_loader(auto)
    if lack:
        return Capabilities(Tier.TOO_OLD, lack)
    estimate = _ESTIMATE if hasattr(auto, _ESTIMATE) else None
    found = (_first(auto, _FILTERS), _first(auto, _SPLITS), estimate)
    missing = [text for part in _PARTS if (text := _lacks_part(*part))]
    if missing:
        return Capabilities(Tier.WHOLE, "; ".join(missing), *found)
    return Capabilities(Tier.BOUNDED, "it reads any range of a file, in chunks", *found)


def _lacks_auto_loader(auto: Any) -> str:
    if auto is None:
        return "it has no AutoLoader"
    if not accepts(auto, ("device",)) or not _takes_two(auto):
        return "its AutoLoader cannot be called as AutoLoader(group, files, device=...)"
    absent = [name for name in ("iterate_weights", "close") if not _called_without_arguments(getattr(auto, name, None))]
    return f"its AutoLoader has no {' and no '.join(absent)} that can be called" if absent else ""


def _lacks_part(module: str, name: str, keywords: tuple[str, ...]) -> str:
    try:
        part = getattr(imported(f"{PACKAGE}.{module}"), name, None)
    except Broken as broken:
        return f"{PACKAGE}.{module} cannot be imported: {type(broken.cause).__name__}"
    if part is None:
        return f"it has no {module}.{name}"
    return "" if accepts(part, keywords) else f"{module}.{name} does not take {', '.join(keywords)} by keyword"


def _takes_two(auto: Any) -> bool:
    """Whether it takes a group and a list of files by position, and needs nothing else but the device."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    by_position = [p.name for p in parameters(auto) or [] if p.kind in kinds]
    return len(by_position) >= 2 and not set(demands(auto)) - {*by_position[:2], "device"}


def _called_without_arguments(method: Any) -> bool:
    found = parameters(method)
    if not found:
        return found is not None and isinstance(method, staticmethod)
    return not set(demands(method)) - {found[0].name}


def _first(callable_: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if accepts(callable_, (name,))), None)
