"""Output on stdout and stderr: one JSON document or text, with names from checkpoints escaped."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

#: Columns of text for a file or pipe, where no line is folded; wider than every table.
_PIPE_COLUMNS = 400


def printable(text: object, keep: str = "") -> str:
    r"""``text`` with characters that control a terminal or break a line written as ``\xNN`` or ``\uNNNN``.

    Control characters, line separators, direction marks, surrogates and unassigned code points are escaped; the
    characters in ``keep`` are not.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode("ascii") for c in str(text))


def size(nbytes: float) -> str:
    """A number of bytes in decimal units, as for disks and networks: ``538.1 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges, in the given order: ``0-3, 8, 3``; ``none`` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs) or "none"


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], right: frozenset[int] = frozenset()) -> None:
    """Prints a table on stdout; control characters in cells are escaped.  ``right`` holds the indexes of right-aligned columns."""
    # Imported here: half of the start-up time of commands that print no table.
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(columns):
        grid.add_column(title, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(printable(cell)) for cell in row))
    Console(markup=False, highlight=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(grid)


def pairs(rows: Iterable[tuple[str, object]]) -> None:
    """Prints ``label  value`` lines on stdout, aligned."""
    listed = [(label, printable(value)) for label, value in rows]
    width = max(len(label) for label, _ in listed)
    for label, value in listed:
        click.echo(f"{label:<{width}}  {value}")


@dataclass(frozen=True, slots=True)
class Output:
    """How this process prints: as JSON or text, and whether it prints at all (rank 0)."""

    json: bool
    speaks: bool

    def emit(self, document: Mapping[str, Any], text: Callable[[], None]) -> None:
        """Prints the result: ``document`` on stdout with ``--json``, else what ``text`` prints."""
        if not self.speaks:
            return
        if self.json:
            click.echo(json.dumps(document, indent=2, allow_nan=False))
        else:
            text()

    def note(self, message: str) -> None:
        """Prints a line on stderr."""
        if self.speaks:
            click.echo(printable(message), err=True)
