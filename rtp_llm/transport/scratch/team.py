"""Reader threads, which get ready while others still plan what they are to read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

import torch

from rtp_llm.transport.scratch.staging import Staging

T = TypeVar("T")


class Team(Generic[T]):
    """``threads`` threads with a :class:`Staging` of their own each, for one job.

    They start, and get their buffers, when the context is entered: page-locked memory takes as long as a plan, and takes
    no part of the interpreter's time.  Leaving the context, with or without a job done, gives the buffers back and ends
    the threads before it returns.
    """

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._job: Future[Callable[[Staging], T] | None] = Future()
        self._pool = ThreadPoolExecutor(threads, "rtp_llm-read")
        self._threads = threads
        self._working: list[Future[T | None]] = []

    def __enter__(self) -> Team[T]:
        if not self._working:  # whoever has the job enters the context of a team that is ready once more
            self._working = [self._pool.submit(self._run) for _ in range(self._threads)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """Ends the threads; those without a job, which then will not come, leave at once."""
        if not self._job.done():
            self._job.set_result(None)
        self._pool.shutdown()

    def work(self, job: Callable[[Staging], T]) -> list[T]:
        """Runs ``job`` once in every thread; returns what each has returned.

        Raises:
            Exception: the first error of a thread, its own or one of getting its buffers, as soon as it is known.  The
                others then are still at work: whoever knows the job stops them.
        """
        self._job.set_result(job)
        done, _ = wait(self._working, return_when=FIRST_EXCEPTION)
        for thread in done:
            thread.result()
        found = [thread.result() for thread in self._working]
        return [result for result in found if result is not None]

    def _run(self) -> T | None:
        with Staging(self._device, self._buffer_bytes) as staging:
            staging.prepare()
            job = self._job.result()
            return None if job is None else job(staging)
