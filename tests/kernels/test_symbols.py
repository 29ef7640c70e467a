"""Names in other packages: each way in which one cannot be called is told apart from the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rtp_llm.kernels.faults import FIXES, KernelFault
from rtp_llm.kernels.symbols import Symbol, resolve_symbol
from tests.kernels.packages import IMPORTS, SIGNATURES, child, planted

_SCRIPT = """
import json
from rtp_llm.kernels.symbols import Symbol, resolve_symbol
found = resolve_symbol(Symbol({module!r}, {name!r}, {keywords!r}))
print(json.dumps([None if found.fault is None else found.fault.name, found.detail]))
"""
_KEYWORDS = ("input", "weight", "eps")


def resolved(folder: Path, module: str = "fakeinfer.ops", name: str = "norm", keywords: tuple[str, ...] = _KEYWORDS) -> tuple[str, str]:
    """Fault and detail that a fresh interpreter finds."""
    fault, detail = json.loads(child(_SCRIPT.format(module=module, name=name, keywords=keywords), folder))
    return fault, detail


def test_a_package_that_is_not_there(tmp_path: Path) -> None:
    """Absent is no fault of the package."""
    assert resolved(tmp_path) == ("NOT_INSTALLED", "fakeinfer is not installed")


@pytest.mark.parametrize("kind", IMPORTS)
def test_an_import_that_fails(tmp_path: Path, kind: str) -> None:
    """Whatever an import raises, of the package or of its module, it is said and not raised."""
    fault, detail = resolved(planted(tmp_path, IMPORTS[kind]))
    assert fault == "IMPORT_FAILED" and kind in detail


def test_a_package_whose_own_import_fails(tmp_path: Path) -> None:
    """The same where the package itself cannot be imported."""
    assert resolved(planted(tmp_path, "", init="import nothing_of_that_name"))[0] == "IMPORT_FAILED"


def test_a_name_or_module_that_is_not_there(tmp_path: Path) -> None:
    """Another version of the package: it find_unsupported the function, or the module, and is otherwise sound."""
    folder = planted(tmp_path, "def other(): pass")
    assert resolved(folder) == ("SYMBOL_MISSING", "it has no fakeinfer.ops.norm")
    assert resolved(folder, module="fakeinfer.elsewhere")[0] == "SYMBOL_MISSING"


@pytest.mark.parametrize("what", SIGNATURES)
def test_a_signature_that_cannot_be_called(tmp_path: Path, what: str) -> None:
    """Every argument is a parameter of its own, and nothing else is asked for."""
    source, detail = SIGNATURES[what]
    fault, said = resolved(planted(tmp_path, source))
    assert fault == "SIGNATURE" and detail in said


def test_what_can_be_called() -> None:
    """Functions with more optional parameters, methods (whose ``self`` is not counted), builtins without a signature."""
    assert resolve_symbol(Symbol("json", "dumps", ("obj", "indent"))).fault is None
    assert resolve_symbol(Symbol("pathlib", "Path.mkdir", ("mode", "parents"))).fault is None
    assert resolve_symbol(Symbol("math", "hypot")).fault is None
    assert resolve_symbol(Symbol("pathlib", "Path.rename", ())).fault is KernelFault.SIGNATURE, "it asks for a target"
    assert resolve_symbol(Symbol("pathlib", "Path.rename", positional=1)).fault is None


def test_every_fault_has_a_fix() -> None:
    """Nothing is reported without what to do."""
    assert set(FIXES) == set(KernelFault)
