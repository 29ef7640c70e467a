"""Progress of a load on stderr: a bar with bytes, speed and time left on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

import click

from rtp_llm.cli.output import size

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

    from rtp_llm.transport.interface import Progress

#: Seconds between lines if stderr is a file or pipe: often enough to show progress, rarely enough for a log.
LINE_SECONDS = 5.0


class LineProgress:
    """A line every :data:`LINE_SECONDS`; none for a quicker load."""

    def __init__(self, every: float = LINE_SECONDS) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._began = self._next = 0.0

    def start(self, total_bytes: int) -> None:
        self._total, self._done = total_bytes, 0
        self._began = time.monotonic()
        self._next = self._began + self._every

    def advance(self, nbytes: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._done += nbytes
            if now < self._next:
                return
            self._next = now + self._every
            done = self._done
        click.echo(self._line(done, now - self._began), err=True)

    def _line(self, done: int, seconds: float) -> str:
        speed = done / max(seconds, 1e-9)
        left = (self._total - done) / speed if speed else 0.0
        share = 100 * done / max(self._total, 1)
        return f"loading: {size(done)} of {size(self._total)} ({share:.0f}%), {speed / 1e9:.2f} GB/s, {left:.0f} s left"

    def stop(self) -> None:
        pass


class BarProgress:
    """A bar on the terminal behind stderr, removed when the load is done."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def start(self, total_bytes: int) -> None:
        # Imported here: only a load on a terminal needs it.
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("loading", total=total_bytes)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, nbytes)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def choose_progress(enabled: bool, speaks: bool) -> Progress | None:
    """The progress display of this process: only rank 0 has one."""
    if not (enabled and speaks):
        return None
    return BarProgress() if sys.stderr.isatty() else LineProgress()
