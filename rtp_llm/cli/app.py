"""``rtp-llm``: the group of commands, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from rtp_llm.cli.commands import COMMANDS
from rtp_llm.cli.failure import report
from rtp_llm.cli.options import common
from rtp_llm.cli.output import Output, printable
from rtp_llm.cli.ranks import end_rank, in_group, leave_group, speaks


def _underscored(token: str) -> str:
    """Flags are declared with underscores; hyphens are accepted too."""
    return token.replace("-", "_")


@click.group(
    name="rtp-llm",
    commands=list(COMMANDS),
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _underscored, "max_content_width": 110},
)
def app() -> None:
    """Turn a Hugging Face checkpoint directory into rank-local, runtime-ready weights.

    Under torchrun the same commands run on all ranks, and rank 0 prints. Exit codes: 0 done, 1 inspect or plan found
    problems, 2 an error that you can put right, 130 interrupted.
    """


def _common_flags(arguments: Sequence[str]) -> Mapping[str, Any]:
    """Reads ``as_json`` and ``debug`` as click would: not as the value of another flag, nor after ``--``.

    They are needed even if the command line is wrong, since they decide how that is reported.
    """
    # A value for a flag without one would stop click's parser here.
    rest = ["" if token.startswith("-") and "=" in token else token for token in arguments]
    _, rest = _parsed(app, rest)
    context = click.Context(app, resilient_parsing=True, **app.context_settings)
    command = app.resolve_command(context, rest)[1] if rest else None
    # An unknown command has at least the common flags.
    return _parsed(common(click.Command(None)), rest)[0] if command is None else _parsed(command, rest[1:])[0]


def _parsed(command: click.Command, arguments: Sequence[str]) -> tuple[Mapping[str, Any], list[str]]:
    """Options by name, and all other arguments, unknown flags among them."""
    context = click.Context(command, resilient_parsing=True, ignore_unknown_options=True, **app.context_settings)
    options, rest, _ = command.make_parser(context).parse_args(list(arguments))
    return options, rest


class _Log(logging.Handler):
    """Log records as single lines on the current stderr, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"{record.levelname.lower()}: {printable(record.getMessage())}", err=True)


@contextmanager
def _logging(output: Output) -> Iterator[None]:
    """The package's log on stderr while a command runs; a program that calls :func:`main` gets its own logging back."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that stderr cannot encode is escaped, instead of a UnicodeEncodeError.
            stream.reconfigure(errors="backslashreplace")
    logger = logging.getLogger("rtp_llm")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = [_Log()] if output.speaks else [logging.NullHandler()]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; see ``docs/cli.md``.  Never raises for a user's mistake.

    Without ``argv`` the process belongs to the command, and one of several ranks ends here.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = _common_flags(arguments)
    output = Output(json=flags.get("as_json") is True, speaks=speaks(os.environ))
    try:
        # Not app.main(), which handles Ctrl-C and a closed pipe itself.
        with _logging(output), app.make_context("rtp-llm", arguments, obj=output) as context:
            code: int = app.invoke(context)
        rank_of_launch = argv is None and in_group()
        leave_group()
        sys.stdout.flush()
        if rank_of_launch:
            end_rank(code)
        return code
    except click.exceptions.Exit as done:  # --help
        return done.exit_code
    except BrokenPipeError:
        # The reader of stdout has gone (`| head`). Python would report that when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    # The outermost level: every error becomes a message, and --debug shows its traceback.
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        code = report(error, as_json=output.json, debug=flags.get("debug") is True, speaks=output.speaks)
        _leave_unwritten()
        if argv is None and in_group():
            end_rank(code)
        return code


def _leave_unwritten() -> None:
    """Python flushes stdout once more at exit, and a full disk would then decide the exit code (120)."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
