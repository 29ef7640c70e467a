"""Heartbeats and a shared first error, over the process group's key-value store.

A collective tells a rank that a peer has died only when the rank takes part in it; a rank that reads its weights for a
minute would learn it a minute later, and a frozen peer never shows.  So each rank beats once a second, watches its
right-hand neighbour, and looks for the first error that anyone has posted.
"""

from __future__ import annotations

import json
import threading
import time
from types import TracebackType

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from rtp_llm.errors import ParallelError, Problem, RtpLlmError
from rtp_llm.parallel.faults import ParallelFault

#: Seconds between beats: a store request a second and rank is nothing, even for 1,000 ranks.
BEAT_SECONDS = 1.0
#: Seconds without a beat after which a peer counts as lost.  Long enough for a rank that holds the interpreter lock in
#: a slow call, short enough that the others end within ten seconds.
LOST_SECONDS = 7.0

_ERROR = "error"
_DONE = "done"


class Watch:
    """Watches the group while the context is open; ``check()`` raises the first error of any rank.

    Leaving the context with an exception posts it, so that the other ranks end with the same cause.
    """

    def __init__(self, store: Store, rank: int, size: int, session: str) -> None:
        self._store, self._rank, self._size = store, rank, size
        # Keys outlive a load in the store; the session keeps one load's errors out of the next.
        self._prefix = f"{session}/"
        self._stop = threading.Event()
        self._problem: Problem | None = None
        self._thread = threading.Thread(target=self._run, name="rtp_llm-watch", daemon=True)

    def __enter__(self) -> Watch:
        if self._size > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._size > 1:
            if error is not None:
                self.post(error)
            self._stop.set()
            self._thread.join(timeout=2 * BEAT_SECONDS)

    def check(self) -> None:
        """Raises ``ParallelError`` if a rank has posted an error or was lost."""
        if self._problem is not None:
            raise ParallelError(self._problem)

    def post(self, error: BaseException) -> None:
        """Makes ``error`` the group's error, unless there is one already."""
        problem = error.problems[0] if isinstance(error, RtpLlmError) else _unforeseen(error)
        if isinstance(problem.fault, ParallelFault) and self._problem is not None:
            return  # the error of another rank, on its way out here
        rank = self._rank if problem.rank is None else problem.rank
        text = json.dumps(problem.to_json() | {"rank": rank})
        try:
            self._store.compare_set(self._prefix + _ERROR, "", text)
        except dist.DistError:
            pass  # the store's host is gone, and with it the group: its own error says so to everyone

    def first_error(self, seconds: float) -> Problem | None:
        """Waits up to ``seconds`` for an error to be known: a broken connection is seen before its cause is."""
        deadline = time.monotonic() + seconds
        while self._problem is None and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(BEAT_SECONDS / 10)
        return self._problem

    def _run(self) -> None:
        neighbour = (self._rank + 1) % self._size
        beat, seen, seen_at = 0, "", time.monotonic()
        try:
            # A connection of its own: a request that blocks on the group's connection would stop the beats.
            store = self._store.clone()  # type: ignore[attr-defined]  # in torch since 2.7, not yet in its stubs
            while not self._stop.wait(BEAT_SECONDS / 2 if beat else 0):
                beat += 1
                store.set(f"{self._prefix}beat/{self._rank}", str(beat))
                if store.check([self._prefix + _ERROR]):
                    self._problem = Problem.from_json(json.loads(store.get(self._prefix + _ERROR)))
                    return
                if store.check([f"{self._prefix}beat/{neighbour}"]):
                    now = store.get(f"{self._prefix}beat/{neighbour}").decode()
                    if now != seen or now == _DONE:
                        seen, seen_at = now, time.monotonic()
                if time.monotonic() - seen_at > LOST_SECONDS:
                    problem = _lost(neighbour)
                    store.compare_set(self._prefix + _ERROR, "", json.dumps(problem.to_json()))
                    self._problem = problem
                    return
            # The neighbour must not take a rank that has finished for one that has died.
            store.set(f"{self._prefix}beat/{self._rank}", _DONE)
        except dist.DistError as error:
            self._problem = Problem(
                ParallelFault.RANK_LOST,
                f"the group's store cannot be reached ({error.__class__.__name__}); its host, rank 0 or the launcher, has ended",
                rank=0,
                expected="a running process",
                actual="no connection",
                fix="look at the output of rank 0 for the cause",
            )


def _lost(rank: int) -> Problem:
    return Problem(
        ParallelFault.RANK_LOST,
        "a rank died or stopped answering",
        rank=rank,
        expected=f"a heartbeat every {BEAT_SECONDS:g} s",
        actual=f"none for {LOST_SECONDS:g} s",
        fix="look at the output of that rank, and at the kernel's log for an out-of-memory kill",
    )


def _unforeseen(error: BaseException) -> Problem:
    return Problem(ParallelFault.RANK_FAILED, f"{error.__class__.__name__}: {error}", fix="look at the output of that rank")
