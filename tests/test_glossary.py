"""One name, one thing: the package's public names, and those that docs/glossary.md explains."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Mapping

from tests.support.paths import ROOT
from tests.support.source import is_command, modules

#: Names that several modules have because they implement one interface: the modules, and the interface.
INTERFACES: Mapping[str, tuple[str, str]] = {
    "main": (r"rtp_llm\.(bench\.\w+|cli\.app|runtime\.chat)", "entry point of a script, under `if __name__`"),
    "mapping": (r"rtp_llm\.models\.\w+(\.mapping)?", "Implementation.rules of a model family"),
    "parse": (r"rtp_llm\.quantization\.\w+", "Method.parse of a quantisation method"),
    "parse_config": (r"rtp_llm\.models\.\w+\.config", "Implementation.read_config of a model family"),
}

#: A name of the package in the glossary, between backticks.
_NAMED = re.compile(r"`(rtp_llm(?:\.\w+)+)`")


def owners() -> dict[str, list[str]]:
    """Public top-level classes and functions, with the modules that define them.  Click commands are named by users."""
    found: dict[str, list[str]] = {}
    for module, tree in modules():
        for node in tree.body:
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if named and not node.name.startswith("_") and not is_command(node):
                found.setdefault(node.name, []).append(module)
    return found


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or what a module has."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            if not hasattr(thing, part) and part not in getattr(thing, "__annotations__", {}):
                return False
            thing = getattr(thing, part, None)
        return True
    return False


def test_a_public_name_stands_for_one_thing() -> None:
    """No two modules define the same public class or function, unless :data:`INTERFACES` says that they implement one interface."""
    outside = {
        name: [module for module in found if name not in INTERFACES or not re.fullmatch(INTERFACES[name][0], module)]
        for name, found in owners().items()
        if len(found) > 1
    }
    assert {name: found for name, found in outside.items() if found} == {}


def test_every_interface_has_implementations() -> None:
    """An entry of :data:`INTERFACES` that no two modules need is deleted."""
    found = owners()
    assert [name for name in INTERFACES if len(found.get(name, ())) < 2] == []


def test_the_glossary_names_what_exists() -> None:
    """Each dotted name in docs/glossary.md is in the package, under that name."""
    named = _NAMED.findall((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    assert named
    assert [name for name in named if not exists(name)] == []


def test_a_name_that_is_gone_is_found() -> None:
    """Modules, classes, methods and fields exist; a misspelt one does not."""
    assert exists("rtp_llm.kernels") and exists("rtp_llm.kernels.needs.KernelNeed") and exists("rtp_llm.layers.cache.PagedCache.take")
    assert exists("rtp_llm.kernels.needs.KernelNeed.op")
    assert not exists("rtp_llm.kernels.needs.Need") and not exists("rtp_llm.kernel.needs")
