"""Reader threads, which get ready while others still plan what they are to read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
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
        self._results: tuple[Future[T | None], ...] = tuple(Future() for _ in range(threads))
        self._first: threading.Thread | None = None

    def __enter__(self) -> Team[T]:
        if self._first is None:  # whoever has the job enters the context of a team that is ready once more
            self._first = self._thread(0)
            self._first.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """Ends the threads; those without a job, which then will not come, leave at once."""
        if not self._job.done():
            self._job.set_result(None)
        if self._first is not None:
            self._first.join()

    def work(self, job: Callable[[Staging], T], meanwhile: Callable[[], None] = lambda: None) -> list[T]:
        """Runs ``job`` once in every thread, and ``meanwhile`` in this one; returns what each thread has returned.

        Raises:
            Exception: the first error of a thread, its own or one of getting its buffers, as soon as it is known, or that of
                ``meanwhile``.  The others then are still at work: whoever knows the job stops them.
        """
        self._job.set_result(job)
        meanwhile()
        done, _ = wait(self._results, return_when=FIRST_EXCEPTION)
        for result in done:
            result.result()
        found = [result.result() for result in self._results]
        return [result for result in found if result is not None]

    def _thread(self, number: int) -> threading.Thread:
        return threading.Thread(target=self._answer, args=(number,), name=f"rtp_llm-read-{number}")

    def _answer(self, number: int) -> None:
        """What each thread does; the first one also starts the others, which takes its time and not the caller's, and waits for them."""
        others: list[threading.Thread] = []
        try:
            if number == 0:
                for other in range(1, len(self._results)):
                    thread = self._thread(other)
                    thread.start()
                    others.append(thread)
            self._results[number].set_result(self._run())
        # Whatever it is belongs to the thread that waits.
        except BaseException as error:  # noqa: BLE001
            self._results[number].set_exception(error)
        for thread in others:
            thread.join()

    def _run(self) -> T | None:
        with Staging(self._device, self._buffer_bytes) as staging:
            staging.prepare()
            job = self._job.result()
            return None if job is None else job(staging)
