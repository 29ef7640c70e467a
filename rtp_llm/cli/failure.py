"""How a command fails: one clear message on stderr, with ``--json`` one document on stdout, and an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import click

from rtp_llm.cli.output import printable
from rtp_llm.errors import INTERNAL, Problem, RtpLlmError

#: An error that the user can fix; click, grep and others use this code.
USER_ERROR = 2
#: A defect of this program (EX_SOFTWARE of sysexits.h).
INTERNAL_ERROR = 70
#: Errors that every rank reports: rank 0 may be gone or never have joined.
_LOUD = frozenset({"RANK_LOST", "BAD_ENVIRONMENT"})
#: 128 + SIGINT, as shells report it.
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as shown to a user.  ``loud``: every rank reports it, since rank 0 may not be able to."""

    kind: str
    lines: tuple[str, ...]
    exit_code: int
    problems: tuple[Problem, ...] = ()
    loud: bool = False

    def document(self) -> dict[str, Any]:
        """The JSON document ``{"error": {"type", "message", "exit_code", "problems"}}``."""
        message = "\n".join(self.lines)
        return {
            "error": {"type": self.kind, "message": message, "exit_code": self.exit_code, "problems": [p.to_json() for p in self.problems]}
        }


def describe(error: BaseException) -> Failure:
    """What ``error`` means to a user."""
    kind = type(error).__name__
    if isinstance(error, RtpLlmError):
        return _of_problems(error)
    if isinstance(error, click.ClickException):
        return _of_usage(error)
    if isinstance(error, (KeyboardInterrupt, click.Abort)):
        return Failure("Interrupted", ("interrupted",), INTERRUPTED)
    if isinstance(error, OSError):
        where = f": {printable(error.filename)}" if error.filename is not None else ""
        return Failure(kind, (f"{printable(error.strerror or error)}{where}",), USER_ERROR, loud=True)
    if isinstance(error, MemoryError):
        return Failure(kind, ("out of memory on this machine",), USER_ERROR, loud=True)
    if kind == "OutOfMemoryError":  # torch's, by its name: torch may not be imported
        first = printable(str(error).partition("\n")[0])
        return Failure(
            kind, (f"out of memory on the device: {first}", "A smaller --batch_size, or shorter prompts, take less."), USER_ERROR, loud=True
        )
    text = printable(f"internal error: {kind}: {error}")
    return Failure(
        kind,
        (text, "This is a defect of rtp-llm: please report it with the output of the same command and --debug."),
        INTERNAL_ERROR,
        loud=True,
    )


def _of_problems(error: RtpLlmError) -> Failure:
    loud = any(problem.code in _LOUD for problem in error.problems)
    code = INTERNAL_ERROR if any(problem.code == INTERNAL for problem in error.problems) else USER_ERROR
    return Failure(type(error).__name__, error.lines(printable), code, error.problems, loud=loud)


def _of_usage(error: click.ClickException) -> Failure:
    lines = [printable(line) for line in error.format_message().splitlines()]
    context = getattr(error, "ctx", None)
    if context is not None:
        lines.append(f"Try '{context.command_path} --help'.")
    return Failure("UsageError", tuple(lines), USER_ERROR)


def report(error: BaseException, *, as_json: bool, debug: bool, speaks: bool) -> int:
    """Reports to the user, if this rank prints, and returns the exit code."""
    failure = describe(error)
    if speaks and as_json:
        with suppress(OSError):  # stdout may have failed; stderr still works
            click.echo(json.dumps(failure.document(), indent=2))
    if speaks or failure.loud:
        rank = "" if speaks else f"rank {printable(os.environ.get('RANK', '?'))}: "
        for line in failure.lines:
            click.echo(f"{rank}{line}", err=True)
        if debug:
            traceback.print_exception(error, file=sys.stderr)
    return failure.exit_code
