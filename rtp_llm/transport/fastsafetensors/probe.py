"""What the installed fastsafetensors can do, found out by looking at its callables, never at its version."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from types import ModuleType
from typing import Any

PACKAGE = "fastsafetensors"


class Tier(IntEnum):
    """What a wheel is good for; a higher one can do all that a lower one can."""

    ABSENT = 0  # not installed
    UNUSABLE = 1  # installed, and its import fails
    TOO_OLD = 2  # importable, without an AutoLoader that can be called
    WHOLE = 3  # AutoLoader: tensors arrive whole, and a file at a time stands on the device
    BOUNDED = 4  # and the parts that AutoLoader is made of: any range of a file arrives, in chunks


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What was found, and why it is no more than that.

    ``copyout_filter``, ``stacked_split`` and ``estimate`` are extensions of some wheels, in which case they are the names of
    keyword parameters of AutoLoader (``estimate``: of an attribute); None where the wheel has nothing of the kind.
    """

    tier: Tier
    reason: str
    copyout_filter: str | None = None
    stacked_split: str | None = None
    estimate: str | None = None


#: Everything an import of a native extension has been seen to raise: a missing library (ImportError, OSError), another
#: build's interface (AttributeError, TypeError), a driver that refuses (RuntimeError).
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError)

#: AutoLoader's extensions: for each the names it has gone by, the newest first.
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


def probe() -> Capabilities:
    """Imports the package and looks at it.  Never raises for a package that is absent, broken or strange."""
    try:
        if importlib.util.find_spec(PACKAGE) is None:
            return Capabilities(Tier.ABSENT, f"{PACKAGE} is not installed")
        module = importlib.import_module(PACKAGE)
    except (*_IMPORT_ERRORS, ValueError) as error:  # ValueError: find_spec, of a module without a specification
        return Capabilities(Tier.UNUSABLE, f"{PACKAGE} cannot be imported: {type(error).__name__}: {error}")
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
        part = getattr(importlib.import_module(f"{PACKAGE}.{module}"), name, None)
    except _IMPORT_ERRORS as error:
        return f"{PACKAGE}.{module} cannot be imported: {type(error).__name__}"
    if part is None:
        return f"it has no {module}.{name}"
    return "" if accepts(part, keywords) else f"{module}.{name} does not take {', '.join(keywords)} by keyword"


def _parameters(callable_: Any) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(callable_).parameters.values())
    except (TypeError, ValueError):  # not callable, or a builtin without a signature
        return None


def accepts(callable_: Any, names: Iterable[str]) -> bool:
    """Whether every name is a parameter of its own that may be given by keyword.

    ``**kwargs`` takes any name and may ignore it, so it counts for nothing; a positional-only parameter has a name that
    cannot be used.
    """
    parameters = _parameters(callable_)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return parameters is not None and set(names) <= {p.name for p in parameters if p.kind in kinds}


def _takes_two(auto: Any) -> bool:
    """Whether a group and a list of files may be given by position, and nothing else but the device is needed."""
    parameters = _parameters(auto) or []
    by_position = [p for p in parameters if p.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = {p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in variable}
    return len(by_position) >= 2 and not required - {p.name for p in by_position[:2]} - {"device"}


def _called_without_arguments(method: Any) -> bool:
    parameters = _parameters(method)
    if not parameters:
        return parameters is not None and isinstance(method, staticmethod)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return not [p for p in parameters[1:] if p.default is inspect.Parameter.empty and p.kind not in variable]


def _first(callable_: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if accepts(callable_, (name,))), None)
