"""What holds for the tree as a whole and no single package can promise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from rtp_llm.version import __version__
from tests.support.paths import ROOT, child_env
from tests.support.source import Function, is_command, modules

#: Parameters, self apart, beyond which a function takes a dataclass instead.
MOST_PARAMETERS = 6


def loaded_by(statement: str) -> set[str]:
    script = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import rtp_llm.checkpoint.catalog", {"torch", "numpy", "transformers"}),
        ("import rtp_llm.errors, rtp_llm.version", {"torch", "numpy", "transformers"}),
        ("import rtp_llm.config", {"torch", "transformers"}),
        ("import rtp_llm.cli", {"torch", "transformers"}),
    ],
)
def test_light_modules_load_nothing_heavy(statement: str, absent: set[str]) -> None:
    """A catalogue, a setting or ``--help`` costs no import of torch: seconds, and hundreds of megabytes."""
    assert not absent & loaded_by(statement)


def test_planning_uses_no_process_groups() -> None:
    """A plan is a pure function of its inputs: nothing in ``plan`` or ``checkpoint`` imports ``torch.distributed``."""
    files = [*ROOT.glob("rtp_llm/plan/**/*.py"), *ROOT.glob("rtp_llm/checkpoint/**/*.py")]
    assert files
    assert [file.name for file in files if any(name.startswith("torch.distributed") for name in imports(file))] == []


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


#: Calls that an assertion may hold: they look, and change nothing.
LOOKS = frozenset({"all", "any", "isinstance", "issubclass", "len", "max", "min", "set", "sorted", "sum", "tuple", "type"})


def changes(node: ast.AST) -> bool:
    """Whether something may happen besides looking: any call that is not in the list, an assignment, a suspension."""
    if isinstance(node, ast.Call):
        return not (isinstance(node.func, ast.Name) and node.func.id in LOOKS)
    return isinstance(node, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom))


def test_assertions_only_look() -> None:
    """``python -O`` leaves assertions out, so nothing may be done in one; what keeps a promise to a user is no assertion at all."""
    files = list(ROOT.glob("rtp_llm/**/*.py"))
    assert files
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assert) and any(map(changes, ast.walk(node.test)))
    ]
    assert found == []


def test_version_is_stated_once() -> None:
    """The installed distribution has the version of ``rtp_llm/version.py``; a stale editable install fails here.
    A platform's wheel adds its local label."""
    assert metadata.version("rtp-llm").partition("+")[0] == __version__


def test_every_requirement_is_pinned_within_its_range() -> None:
    """Each line of ``requirements.in`` and ``dev.in`` has exact pins in ``requirements_dev.txt``, inside the range."""
    from packaging.requirements import Requirement

    def lines(name: str) -> list[Requirement]:
        text = (ROOT / "deps" / name).read_text()
        return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]

    pins = [(re.sub(r"[-_.]+", "-", pin.name).lower(), str(pin.specifier).removeprefix("==")) for pin in lines("requirements_dev.txt")]
    for wanted in [*lines("requirements.in"), *lines("dev.in")]:
        versions = [version for name, version in pins if name == wanted.name]
        assert versions, f"{wanted.name} has no pin: make pins"
        assert all(version in wanted.specifier for version in versions), f"{wanted} against {versions}: make pins"


def test_no_function_takes_more_than_six_parameters() -> None:
    """At most six parameters, unless the docstring gives the reason in a sentence with the words "more than six"."""
    found = [
        f"{module}:{node.lineno} {node.name}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, Function) and len(parameters(node)) > MOST_PARAMETERS and not is_command(node)
        if "more than six" not in (ast.get_docstring(node) or "")
    ]
    assert found == []


def parameters(function: Function) -> list[str]:
    """Names of the parameters, without ``self`` and ``cls``."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for place, name in enumerate(names) if place or name not in ("self", "cls")]
