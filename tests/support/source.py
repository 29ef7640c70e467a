"""The package's source files as syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.paths import ROOT

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of ``rtp_llm``: its dotted name and its tree."""
    for file in sorted(ROOT.glob("rtp_llm/**/*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        yield ".".join(part for part in parts if part != "__init__"), ast.parse(file.read_text(encoding="utf-8"))


def is_command(function: ast.AST) -> bool:
    """Whether a function is a click command or group: users choose its name and its parameters are flags."""
    if not isinstance(function, Function):
        return False
    names = {ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) for decorator in function.decorator_list}
    return bool(names & {"click.command", "click.group"})
