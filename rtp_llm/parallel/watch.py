"""Heartbeats, the first error, and small messages between ranks, through a key-value store.

A collective shows a dead peer only to ranks that take part in it: one that reads weights for a minute learns it a minute later,
and a frozen peer never shows.  So each rank sends a beat every second, watches the next rank, and looks for the first posted
error.  The kernel reports the death of a process on the same host at once.  Silence has to last long, since a healthy rank on a
busy machine is silent too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rtp_llm.errors import ParallelError, Problem, RtpLlmError
from rtp_llm.parallel.faults import ParallelFault
from rtp_llm.parallel.process import Process

#: Seconds between beats: a few store requests a second and rank are nothing, even for 1,000 ranks.
BEAT_SECONDS = 1.0
#: Seconds without a beat after which a peer counts as lost: it is frozen, or its host is gone.  A healthy rank was silent for
#: more than five seconds on an overloaded machine.  Half of the time-out where that is shorter, so that the loss is reported
#: before other ranks time out.
LOST_SECONDS = 30.0
#: Seconds to wait for the cause of a broken connection: a few beats, in which the dead rank's neighbour posts it.  After that
#: the broken connection is the reported cause, so that all ranks end within ten seconds.
CAUSE_SECONDS = 8.0
#: Seconds between two requests for a message.  The pause doubles from the first number up to as much for every rank, at most to
#: the second, since requests of all ranks share the store.
_LOOK_SECONDS = (0.002, 0.05)

#: Problems of one rank that others receive: more than a message shows, and little for the store.
_MOST_SHARED = 100

_ERROR = "error"
_DONE = "done"


class Watch:
    """Watches the group while the context is open; ``check()`` raises the first error of any rank.

    Leaving the context with an exception posts it, so that the other ranks end with the same cause.  ``store``: this watch's
    own, empty part of the launch's store.  ``together``: all ranks have just met, so a rank that opens its watch much later is
    lost; otherwise it may come within ``timeout_s``.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float, *, together: bool = True) -> None:
        self.rank, self.size = rank, size
        self._silence_s = min(LOST_SECONDS, timeout_s / 2)
        self._first_beat_s = self._silence_s if together else timeout_s
        self._store, self._timeout_s = store, timeout_s
        self._stop = threading.Event()
        self._problems: tuple[Problem, ...] = ()
        self._rounds = 0
        self._thread = threading.Thread(target=self._run, name="rtp_llm-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self.size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.size > 1:
            if error is not None:
                self.post(error)
                if not self._problems:
                    # A launcher ends all ranks once one has ended; rank 0 must report the cause before.
                    time.sleep(1.5 * BEAT_SECONDS)
            self._stop.set()
            # A thread that waits for the store when Python ends can abort the process; after an error the store may be gone.
            self._thread.join(timeout=CAUSE_SECONDS if error is None else 2 * BEAT_SECONDS)

    def check(self) -> None:
        """Raises ``ParallelError`` if a rank has posted an error or was lost."""
        if self._problems:
            raise ParallelError(self._problems)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; all ranks call it, in the same order.

        Raises:
            ParallelError: with the first error of any rank, at once; or after the time-out.
        """
        if self.size == 1:
            return [payload]
        self._rounds += 1
        keys = [f"message/{self._rounds}/{rank}" for rank in range(self.size)]
        deadline, pause = time.monotonic() + self._timeout_s, _LOOK_SECONDS[0]
        longest = min(_LOOK_SECONDS[1], self.size * _LOOK_SECONDS[0])
        try:
            self._store.set(keys[self.rank], payload.hex())
            while not self._store.check(keys):
                self.check()
                if time.monotonic() > deadline:
                    silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise ParallelError(broken(self.rank, self.size, f"nothing from rank(s) {silent} for {self._timeout_s:g} s"))
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return [bytes.fromhex(self._store.get(key).decode()) for key in keys]
        except dist.DistError as error:
            raise ParallelError(self.first_error(CAUSE_SECONDS) or _no_store(error)) from error

    def all_gather_json(self, value: object) -> list[Any]:
        """:meth:`exchange` for values that JSON can hold (tuples arrive as lists)."""
        return [json.loads(reply) for reply in self.exchange(json.dumps(value).encode())]

    def post(self, error: BaseException) -> None:
        """Makes ``error`` the group's error, unless there is one already."""
        problems = error.problems if isinstance(error, RtpLlmError) else (_unforeseen(error),)
        self._post([p if p.rank is not None else replace(p, rank=self.rank) for p in problems[:_MOST_SHARED]])

    def first_error(self, seconds: float) -> tuple[Problem, ...]:
        """The first error of any rank, or nothing.  Waits up to ``seconds`` for it: a broken connection shows before its
        cause."""
        deadline = time.monotonic() + seconds
        while not self._problems and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(BEAT_SECONDS / 10)
        return self._problems

    def _post(self, problems: Sequence[Problem]) -> None:
        try:
            self._store.compare_set(_ERROR, "", json.dumps([p.to_json() for p in problems]))
        except dist.DistError:
            pass  # the store's host is gone: every rank notices by itself

    def _run(self) -> None:
        try:
            # Its own connection: a blocking request on the group's connection would stop the beats.
            self._beat(self._store.clone())  # type: ignore[attr-defined]  # in torch since 2.7, not yet in its stubs
        except dist.DistError as error:
            self._problems = (_no_store(error),)

    def _beat(self, store: Store) -> None:
        store.set(f"process/{self.rank}", Process.own().to_json())
        with _Neighbour((self.rank + 1) % self.size, self._silence_s, self._first_beat_s) as neighbour:
            for beats in count(1):
                store.set(f"beat/{self.rank}", str(beats))
                if store.check([_ERROR]):
                    self._problems = tuple(map(Problem.from_json, json.loads(store.get(_ERROR))))
                    return
                if lost := neighbour.lost(store):
                    self._problems = (lost,)
                    self._post(self._problems)
                    return
                if self._stop.wait(BEAT_SECONDS):
                    # A finished rank must not count as dead.
                    store.set(f"beat/{self.rank}", _DONE)
                    return


class _Neighbour(ExitStack):
    """The watched rank.  It is lost after ``silence_s`` seconds without a beat; before its first beat, after ``first_beat_s``."""

    def __init__(self, rank: int, silence_s: float, first_beat_s: float) -> None:
        super().__init__()
        self._rank, self._silence_s, self._first_beat_s = rank, silence_s, first_beat_s
        self._process: Process | None = None
        self._seen, self._seen_at = b"", time.monotonic()

    def lost(self, store: Store) -> Problem | None:
        """The problem if it is lost, else None."""
        if self._process is None and store.check([f"process/{self._rank}"]):
            self._process = self.enter_context(Process.from_json(store.get(f"process/{self._rank}")))
        # Before the last beat is read: a process that ends after its final beat is not lost.
        ended = self._process is not None and self._process.ended()
        beat = store.get(f"beat/{self._rank}") if store.check([f"beat/{self._rank}"]) else b""
        if beat != self._seen or beat.decode() == _DONE:
            self._seen, self._seen_at = beat, time.monotonic()
        elif ended:
            return _ended(self._rank)
        silence = self._silence_s if self._seen else self._first_beat_s
        return _silent(self._rank, silence) if time.monotonic() - self._seen_at > silence else None


def broken(rank: int, size: int, what: str) -> Problem:
    """A failed meeting of ranks, where no rank has posted a cause."""
    return Problem(
        ParallelFault.RANK_LOST,
        f"ranks could not meet: {what.splitlines()[0]}",
        rank=rank,
        expected=f"all {size} ranks",
        actual="a broken connection or a time-out",
        fix="look at the output of the other ranks",
    )


def _no_store(error: dist.DistError) -> Problem:
    return Problem(
        ParallelFault.RANK_LOST,
        f"the group's store cannot be reached ({error.__class__.__name__}): its host, rank 0 or the launcher, has ended",
        rank=0,
        expected="a running process",
        actual="no connection",
        fix="look at the output of rank 0 for the cause",
    )


def _ended(rank: int) -> Problem:
    return Problem(
        ParallelFault.RANK_LOST,
        "a rank died",
        rank=rank,
        expected="a running process",
        actual="one that has ended without a word",
        fix="look at the output of that rank, and at the kernel's log for an out-of-memory kill",
    )


def _silent(rank: int, silence: float) -> Problem:
    return Problem(
        ParallelFault.RANK_LOST,
        "a rank stopped answering",
        rank=rank,
        expected=f"a heartbeat every {BEAT_SECONDS:g} s",
        actual=f"none for {silence:g} s",
        fix="look at the output of that rank, and whether its host still runs",
    )


def _unforeseen(error: BaseException) -> Problem:
    return Problem(ParallelFault.RANK_FAILED, f"{error.__class__.__name__}: {error}", fix="look at the output of that rank")
