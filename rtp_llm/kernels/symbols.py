"""Names in other packages that are called here, and whether what is installed has them."""

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

    Everything is passed by keyword but ``positional`` first arguments (a method's ``self`` is not counted).
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
    """What became of a symbol: ``fault`` is None where it can be called as it will be, else ``detail`` says why not."""

    symbol: Symbol
    fault: KernelFault | None = None
    detail: str = ""


def resolve_all(symbols: Iterable[Symbol]) -> dict[Symbol, Resolution]:
    """Imports what is named and looks at it.  Never raises for a package that is absent, broken or strange.

    What is wrong with a package is found once, and is then wrong with all of its names.
    """
    packages: dict[str, Resolution] = {}
    found = {}
    for symbol in symbols:
        package = symbol.module.partition(".")[0]
        if package not in packages:
            packages[package] = _package(Symbol(package, ""))
        whole = packages[package]
        found[symbol] = resolve(symbol) if whole.fault is None else replace(whole, symbol=symbol)
    return found


def _package(symbol: Symbol) -> Resolution:
    try:
        imported(symbol.module)
    except NotInstalled as absent:
        return Resolution(symbol, KernelFault.NOT_INSTALLED, str(absent))
    except Broken as broken:
        return Resolution(symbol, KernelFault.IMPORT_FAILED, str(broken))
    return Resolution(symbol)


def resolve(symbol: Symbol) -> Resolution:
    """The same for one name."""
    try:
        module = imported(symbol.module)
    except NotInstalled as absent:
        return Resolution(symbol, KernelFault.NOT_INSTALLED, str(absent))
    except Broken as broken:
        # A module that is not there, in a package that is: another version.
        gone = isinstance(broken.cause, ModuleNotFoundError) and broken.cause.name == symbol.module and "." in symbol.module
        fault = KernelFault.SYMBOL_MISSING if gone else KernelFault.IMPORT_FAILED
        return Resolution(symbol, fault, str(broken))
    try:
        found = reduce(getattr, symbol.name.split("."), module)
    except AttributeError:
        return Resolution(symbol, KernelFault.SYMBOL_MISSING, f"it has no {symbol.path}")
    lack = _lacks(symbol, found)
    return Resolution(symbol, KernelFault.SIGNATURE, f"{symbol.path} {lack}") if lack else Resolution(symbol)


def called(symbol: Symbol) -> Any:
    """The object that a symbol which has been resolved names."""
    return reduce(getattr, symbol.name.split("."), imported(symbol.module))


def _lacks(symbol: Symbol, found: Any) -> str:
    if not callable(found):
        return "cannot be called"
    if not symbol.keywords and parameters(found) is None:
        return ""  # a builtin, whose signature nobody can see
    if not accepts(found, symbol.keywords):
        return f"does not take {', '.join(name for name in symbol.keywords if not accepts(found, (name,)))} by keyword"
    own = 1 if "." in symbol.name else 0  # self
    more = [name for name in demands(found)[own + symbol.positional :] if name not in symbol.keywords]
    return f"asks for {', '.join(more)}" if more else ""
