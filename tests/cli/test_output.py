"""What reaches a terminal cannot steer it, and failures are told in full."""

from __future__ import annotations

import json

import click
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.cli.failure import describe, report
from rtp_llm.cli.output import Output, pairs, print_table, printable, size
from rtp_llm.config import ConfigFault
from rtp_llm.errors import MESSAGE_LIMIT, ConfigError, ParallelError, Problem
from rtp_llm.parallel.faults import ParallelFault

#: A title, a colour, a forged line, a right-to-left mark, rich markup, a lone surrogate.
HOSTILE = "a\x1b]0;owned\x07\x1b[31m\nproblem: none\u202eb[bold]c[/bold]\ud800"


@given(st.text())
def test_printable_leaves_nothing_that_steers_a_terminal(text: str) -> None:
    """Only printable characters come out, whatever goes in, and harmless text is not touched."""
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


def test_tables_and_pairs_show_hostile_names_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes and markup of a tensor's name are shown, not obeyed, and no line can be forged."""
    print_table(("name",), [(HOSTILE,)])
    pairs([("name", HOSTILE)])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\u202e" not in out and "[bold]c[/bold]" in out
    assert r"a\x1b]0;owned\x07\x1b[31m\nproblem: none\u202eb" in out


def test_a_problem_of_hostile_parts_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """An error message has as many lines as findings, and the JSON document keeps the true name."""
    error = ConfigError(Problem(ConfigFault.BAD_VALUE, "wrong", file=HOSTILE, tensor=HOSTILE))
    assert report(error, as_json=True, debug=False, speaks=True) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "\x1b" not in captured.err
    assert json.loads(captured.out)["error"]["problems"][0]["tensor"] == HOSTILE


def test_long_lists_are_cut_in_the_message_and_whole_in_json() -> None:
    """More than a screen of findings hides the first one, but a program gets them all."""
    many = [Problem(ConfigFault.BAD_VALUE, f"problem {i:03}") for i in range(MESSAGE_LIMIT + 5)]
    failure = describe(ConfigError(many))
    assert len(failure.lines) == MESSAGE_LIMIT + 2 and "5 more" in failure.lines[-1]
    assert len(failure.document()["error"]["problems"]) == MESSAGE_LIMIT + 5


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError(Problem(ConfigFault.BAD_VALUE, "wrong")), 2, "configuration: BAD_VALUE: wrong"),
        (click.UsageError("no such thing"), 2, "no such thing"),
        (FileNotFoundError(2, "No such file or directory", "x\ny"), 2, r"No such file or directory: x\ny"),
        (MemoryError(), 2, "out of memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), 2, "out of memory on the device: CUDA out of memory."),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("by\nzero"), 70, r"internal error: ZeroDivisionError: by\nzero"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_codes(error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of error has its code and one clear message, without a traceback unless it is asked for."""
    assert report(error, as_json=False, debug=False, speaks=True) == code
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == "" and "Traceback" not in captured.err
    report(error, as_json=False, debug=True, speaks=True)
    assert type(error).__name__ in capsys.readouterr().err


def test_silent_ranks_speak_only_where_rank_0_may_not(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared error is rank 0's to tell; a lost connection, or an error that nobody else knows of, is told by each."""
    monkeypatch.setenv("RANK", "3")
    shared = ParallelError(Problem(ParallelFault.RANK_FAILED, "x", rank=1))
    assert report(shared, as_json=True, debug=False, speaks=False) == 2
    assert capsys.readouterr() == ("", "")
    for error in (ParallelError(Problem(ParallelFault.RANK_LOST, "x", rank=0)), ZeroDivisionError("y")):
        report(error, as_json=True, debug=False, speaks=False)
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("rank 3: ")


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (538_100_000, "538.1 MB"), (4.4e15, "4400.0 TB")]
)
def test_sizes_are_decimal(nbytes: float, text: str) -> None:
    """Units as disks and networks use them, one decimal."""
    assert size(nbytes) == text


def test_only_the_speaking_rank_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Output of rank 0 alone, as JSON or text, never both."""
    Output(json=True, speaks=False).emit({"a": 1}, lambda: print("text"))
    assert capsys.readouterr().out == ""
    Output(json=True, speaks=True).emit({"a": 1}, lambda: print("text"))
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    Output(json=False, speaks=True).emit({"a": 1}, lambda: print("text"))
    assert capsys.readouterr().out == "text\n"
