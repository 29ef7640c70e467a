"""The installed flashinfer is the one that is called: it imports without a GPU, and has every name with every argument."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from arch_config.table import load_table
from rtp_llm.kernels.backends import FLASHINFER
from tests.kernels.packages import child
from tests.support.paths import ROOT

_SCRIPT = """
import json, torch
from rtp_llm.kernels import compile
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.symbols import resolve_symbols
from tests.kernels.declared import NEEDS

symbols = {*FLASHINFER.symbols(NEEDS), *compile.SYMBOLS}
symbols |= {symbol for function in FLASHINFER.functions.values() for symbol in function.symbols}
found = resolve_symbols(symbols)
print(json.dumps({s.path: None if r.fault is None else [r.fault.name, r.detail] for s, r in found.items()}))
"""

_SPEC = """
import json, torch
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.compile import described
from tests.kernels.declared import NEEDS

modules = dict.fromkeys(module for need in NEEDS for module in FLASHINFER.functions[need.op].modules(need))
for module, spec in described(modules):
    for attribute in ("name", "build_dir", "is_aot", "get_library_path", "get_object_paths"):
        assert hasattr(spec, attribute), (module, attribute)
    assert str(spec.get_library_path()).startswith(str(spec.build_dir)) and spec.get_object_paths()
print(json.dumps([spec.name for _, spec in described(modules)]))
"""


def test_every_name_that_is_called_is_there(tmp_path: Path) -> None:
    """Import, names, and arguments by keyword, of what layers call and of what compiles it.  Fails where the wheel is missing."""
    found = json.loads(child(_SCRIPT, env={"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}))
    assert len(found) >= 12
    assert {path: fault for path, fault in found.items() if fault} == {}


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    """A read-only home: flashinfer cannot be imported, which is said, with the place, and not raised."""
    (tmp_path / "file").touch()
    found = json.loads(child(_SCRIPT, env={"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "file")}))
    (fault, detail), *others = found.values()
    assert fault == "IMPORT_FAILED" and detail.startswith("flashinfer cannot be imported") and str(tmp_path) in detail
    assert all(other == [fault, detail] for other in others), "one thing is wrong, and is told once"


def test_modules_can_be_described(tmp_path: Path) -> None:
    """What a module's description is asked for is there, for a GPU that is only named."""
    env = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    assert {"norm", "silu_and_mul", "rope"} <= set(json.loads(child(_SPEC, env=env)))


def test_one_version() -> None:
    """What is installed is what is asked for, and what the CUDA platforms ship."""
    name, version = FLASHINFER.requirement.split("==")
    assert metadata.version(name) == version
    table = load_table(ROOT / "arch_config" / "platforms.bzl")
    assert {p.flashinfer_version for p in table.platforms.values() if p.flashinfer} == {version}
