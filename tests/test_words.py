"""Docstrings can be read once: no sentence is long."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest

from tests.support.source import modules

#: The longest sentence, in words; a literal between backticks is one word.
MOST_WORDS = 35

#: What is no prose: fenced code, and indented blocks behind ``::``.
_CODE = re.compile(r"```.*?```|(?<=::)\n(?:\n|[ ]+[^\n]*\n?)+", re.DOTALL)
_LITERAL = re.compile(r"``[^`]*``|`[^`]*`")
#: What begins a new text: an empty line, a list's item, a heading such as ``Args:``, an argument's name.
_BREAK = re.compile(r"\n\s*\n|\n\s*[-*] |^\s*(?:Args|Returns|Raises|Yields):\s*$|\n(?=[ ]+[\w., *]+: )", re.MULTILINE)
_END = re.compile(r"(?<=[.!?:;])\s+")


def sentences(docstring: str) -> Iterator[str]:
    """The sentences of a docstring; a colon and a semicolon end one too."""
    text = _LITERAL.sub("literal", _CODE.sub("\n\n", inspect.cleandoc(docstring)))
    for paragraph in _BREAK.split(text):
        yield from filter(None, (" ".join(sentence.split()) for sentence in _END.split(paragraph)))


def test_sentences_are_short() -> None:
    """No sentence of a docstring in ``rtp_llm`` has more than 35 words."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{module}:{getattr(node, 'lineno', 1)}: {len(sentence.split())} words: {sentence}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, documented)
        for sentence in sentences(ast.get_docstring(node, clean=False) or "")
        if len(sentence.split()) > MOST_WORDS
    ]
    assert found == []


@pytest.mark.parametrize(
    ("docstring", "wanted"),
    [
        ("One.  Two\nlines: three; four", ["One.", "Two lines:", "three;", "four"]),
        ("``a b c`` is\n``d\ne`` here.", ["literal is literal here."]),
        ("Say.\n\nArgs:\n    one: first\n    two: second\n", ["Say.", "one:", "first", "two:", "second"]),
        ("Run::\n\n    a b c\n\nDone.\n```\nx y\n```", ["Run::", "Done."]),
        ("List:\n- one two\n- three", ["List:", "one two", "three"]),
    ],
)
def test_where_sentences_end(docstring: str, wanted: list[str]) -> None:
    """Code is no sentence, a literal is one word, and headings, items and arguments begin anew."""
    assert list(sentences(docstring)) == wanted
