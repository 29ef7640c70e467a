"""Bytes over time, as reported by a load and as counted by the kernel."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

#: Seconds between two samples of the kernel's counters: 200 points a second, at 50 us each.
_EVERY = 0.005

_IO = Path("/proc/self/io")
#: proc(5): bytes through read system calls, whether cached or not; bytes that a storage device had to bring.
_COUNTERS = (("read", re.compile(r"^rchar: (\d+)$", re.MULTILINE)), ("storage", re.compile(r"^read_bytes: (\d+)$", re.MULTILINE)))


class Recorder:
    """A progress display that shows nothing and keeps ``(seconds, bytes)`` of every report, from any thread.

    A transport may also report its own stages with :meth:`mark`, if the display has it: ``copied`` when bytes have left the
    host.
    """

    def __init__(self) -> None:
        self._zero = time.perf_counter()
        # Appending is atomic; a lock would slow the measured threads down.
        self._events: dict[str, list[tuple[float, int]]] = {"placed": []}
        self.total = 0
        self.started: float | None = None

    def start(self, total_bytes: int) -> None:
        self.total = total_bytes
        self.started = time.perf_counter() - self._zero

    def advance(self, nbytes: int) -> None:
        self._events["placed"].append((time.perf_counter() - self._zero, nbytes))

    def mark(self, stage: str, nbytes: int) -> None:
        """``nbytes`` more have gone through ``stage``."""
        self._events.setdefault(stage, []).append((time.perf_counter() - self._zero, nbytes))

    def stop(self) -> None: ...

    def since(self) -> float:
        """Seconds since the recorder was made."""
        return time.perf_counter() - self._zero

    @property
    def first(self) -> float | None:
        """Seconds until the first bytes were in place; None where none are yet."""
        placed = self._events["placed"]
        return placed[0][0] if placed else None

    def curves(self) -> dict[str, list[tuple[float, int]]]:
        """For each stage ``(seconds, bytes so far)``, in order of time."""
        return {stage: _sums(events) for stage, events in self._events.items() if events}


def _sums(events: list[tuple[float, int]]) -> list[tuple[float, int]]:
    curve, total = [], 0
    for seconds, nbytes in sorted(events):
        total += nbytes
        curve.append((round(seconds, 6), total))
    return curve


class KernelCounters:
    """Samples the kernel's counters of this process's reads into ``curves``, on a recorder's clock, while its context runs.

    ``curves`` stay empty if the kernel has no counters."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._stop = recorder, threading.Event()
        self._thread = threading.Thread(target=self._run, name="rtp_llm-counters", daemon=True)
        self.curves: dict[str, list[tuple[float, int]]] = {}
        self._before: dict[str, int] = {}

    def __enter__(self) -> KernelCounters:
        self._before = _counters()
        self.curves = {name: [(round(self._recorder.since(), 6), 0)] for name in self._before}
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._sample()

    def _sample(self) -> None:
        now = round(self._recorder.since(), 6)
        for name, value in _counters().items():
            self.curves[name].append((now, value - self._before[name]))


def _counters() -> dict[str, int]:
    try:
        text = _IO.read_text(encoding="ascii")
    except OSError:  # not Linux, or a container that hides it
        return {}
    return {name: int(found.group(1)) for name, pattern in _COUNTERS if (found := pattern.search(text))}


def events_json(recorder: Recorder, counters: KernelCounters, seconds: float) -> dict[str, Any]:
    """What :mod:`rtp_llm.bench.plot` draws: ``seconds``, ``total`` bytes, ``started``, and ``curves`` by stage."""
    return {
        "seconds": seconds,
        "total": recorder.total,
        "started": recorder.started,
        "curves": {name: list(map(list, curve)) for name, curve in {**counters.curves, **recorder.curves()}.items()},
    }
