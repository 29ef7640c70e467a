"""What an installed package offers, found out by importing it and looking at its callables, never at its version."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

#: Everything an import of a native extension has been seen to raise: a missing library (ImportError, OSError), another
#: build's interface (AttributeError, TypeError), a driver that refuses (RuntimeError).
IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError, TypeError)


class NotInstalled(Exception):
    """No package of that name is on the path."""


class Broken(Exception):
    """A package or module is there and cannot be imported; ``cause`` says what its import raised."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"{name} cannot be imported: {type(cause).__name__}: {cause}")
        self.cause = cause


def imported(name: str) -> ModuleType:
    """The module ``name``, with dots for a module of a package.

    Raises:
        NotInstalled: its package is not there.
        Broken: the package is there, and it or the module cannot be imported.
    """
    package = name.partition(".")[0]
    try:
        if importlib.util.find_spec(package) is None:
            raise NotInstalled(f"{package} is not installed")
        return importlib.import_module(name)
    except (*IMPORT_ERRORS, ValueError) as error:  # ValueError: find_spec, of a module without a specification
        raise Broken(name, error) from error


def parameters(callable_: Any) -> list[inspect.Parameter] | None:
    """The parameters of a callable; None where it has no signature that could be looked at."""
    try:
        return list(inspect.signature(callable_).parameters.values())
    except (TypeError, ValueError):  # not callable, or a builtin without a signature
        return None


def accepts(callable_: Any, names: Iterable[str]) -> bool:
    """Whether every name is a parameter of its own that may be given by keyword.

    ``**kwargs`` takes any name and may ignore it, so it counts for nothing; a positional-only parameter has a name that
    cannot be used.
    """
    found = parameters(callable_)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return found is not None and set(names) <= {p.name for p in found if p.kind in kinds}


def demands(callable_: Any) -> list[str]:
    """The names of the parameters without which it cannot be called."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters(callable_) or [] if p.default is inspect.Parameter.empty and p.kind not in variable]
