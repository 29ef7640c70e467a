"""Functions of other packages that are called here, and whether the installed version has them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from rtp_llm.installed import Broken, NotInstalled, accepts, demands, imported, parameters
from rtp_llm.kernels.faults import KernelFault


@dataclass(frozen=True, slots=True)
class Symbol:
    """``name`` (dots for a method of a class) in ``module``, called with arguments by the names ``keywords``.

    The first ``positional`` arguments (without a method's ``self``) are passed by position, all others by keyword.
    """

    module: str
    name: str
    keywords: tuple[str, ...] = ()
    positional: int = 0

    @property
    def path(self) -> str:
        """``flashinfer.norm.rmsnorm``."""
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, slots=True)
class Resolution:
    """Whether a symbol can be called as it will be: ``fault`` is None if so, else ``detail`` says why not."""

    symbol: Symbol
    fault: KernelFault | None = None
    detail: str = ""


def resolve_symbols(symbols: Iterable[Symbol]) -> dict[Symbol, Resolution]:
    """Imports each symbol and checks its signature.  A missing or broken package is a fault, never an exception.

    A fault of a package is found once and then holds for all its symbols.
    """
    packages: dict[str, Resolution] = {}
    found = {}
    for symbol in symbols:
        package = symbol.module.partition(".")[0]
        if package not in packages:
            packages[package] = _package(Symbol(package, ""))
        whole = packages[package]
        found[symbol] = resolve_symbol(symbol) if whole.fault is None else replace(whole, symbol=symbol)
    return found


def _package(symbol: Symbol) -> Resolution:
    try:
        imported(symbol.module)
    except NotInstalled as absent:
        return Resolution(symbol, KernelFault.NOT_INSTALLED, str(absent))
    except Broken as broken:
        return Resolution(symbol, KernelFault.IMPORT_FAILED, str(broken))
    return Resolution(symbol)


def resolve_symbol(symbol: Symbol) -> Resolution:
    """As :func:`resolve_symbols`, for one symbol."""
    try:
        module = imported(symbol.module)
    except NotInstalled as absent:
        return Resolution(symbol, KernelFault.NOT_INSTALLED, str(absent))
    except Broken as broken:
        # The package is there but this module is not: another version.
        gone = isinstance(broken.cause, ModuleNotFoundError) and broken.cause.name == symbol.module and "." in symbol.module
        fault = KernelFault.SYMBOL_MISSING if gone else KernelFault.IMPORT_FAILED
        return Resolution(symbol, fault, str(broken))
    try:
        found = reduce(getattr, symbol.name.split("."), module)
    except AttributeError:
        return Resolution(symbol, KernelFault.SYMBOL_MISSING, f"it has no {symbol.path}")
    mismatch = _mismatch(symbol, found)
    return Resolution(symbol, KernelFault.SIGNATURE, f"{symbol.path} {mismatch}") if mismatch else Resolution(symbol)


def called(symbol: Symbol) -> Any:
    """The object that a resolved symbol names."""
    return reduce(getattr, symbol.name.split("."), imported(symbol.module))


def _mismatch(symbol: Symbol, found: Any) -> str:
    if not callable(found):
        return "cannot be called"
    if not symbol.keywords and parameters(found) is None:
        return ""  # a builtin, whose signature nobody can see
    if not accepts(found, symbol.keywords):
        return f"does not take {', '.join(name for name in symbol.keywords if not accepts(found, (name,)))} by keyword"
    own = 1 if "." in symbol.name else 0  # self
    more = [name for name in demands(found)[own + symbol.positional :] if name not in symbol.keywords]
    return f"asks for {', '.join(more)}" if more else ""
