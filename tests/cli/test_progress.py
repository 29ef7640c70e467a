"""Progress: bytes, speed and time left, from several threads, without a word too many."""

from __future__ import annotations

import re
import threading

import pytest

from rtp_llm.cli.progress import BarProgress, LineProgress, choose_progress


def test_lines_count_every_byte_of_every_thread(capsys: pytest.CaptureFixture[str]) -> None:
    """No advance is lost when threads report at once; each line has bytes, share, speed and time left."""
    progress = LineProgress(every=0.0)
    progress.start(80_000_000)
    threads = [threading.Thread(target=lambda: [progress.advance(10_000) for _ in range(1000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    progress.stop()
    lines = capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"loading: \S+ \S+ of 80\.0 MB \(\d+%\), \d+\.\d\d GB/s, \d+ s left", line) for line in lines)
    assert any("80.0 MB of 80.0 MB (100%)" in line for line in lines)


def test_lines_are_rare(capsys: pytest.CaptureFixture[str]) -> None:
    """A load that is over before the interval prints nothing, however often bytes arrive."""
    progress = LineProgress(every=3600.0)
    progress.start(1000)
    for _ in range(1000):
        progress.advance(1)
    progress.stop()
    assert capsys.readouterr().err == ""


def test_nothing_to_load_is_no_division_by_zero(capsys: pytest.CaptureFixture[str]) -> None:
    """An empty plan shows progress, too."""
    progress = LineProgress(every=0.0)
    progress.start(0)
    progress.advance(0)
    assert "0 B of 0 B" in capsys.readouterr().err


def test_only_a_speaking_rank_that_wants_it_has_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has a bar on a terminal and lines elsewhere; other ranks, and ``--no_progress``, have none."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    assert isinstance(choose_progress(True, True), LineProgress)
    assert choose_progress(False, True) is None
    assert choose_progress(True, False) is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    assert isinstance(choose_progress(True, True), BarProgress)


def test_the_bar_takes_reports_before_and_after_its_time() -> None:
    """A reader thread that is late by a moment breaks nothing."""
    bar = BarProgress()
    bar.advance(1)
    bar.stop()
    bar.start(10)
    bar.advance(10)
    bar.stop()
    bar.advance(1)
    bar.stop()
