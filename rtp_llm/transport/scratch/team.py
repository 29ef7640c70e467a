"""Reader threads, which get ready while others still plan what they are to read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from rtp_llm.transport.scratch.staging import Pinned, Staging

T = TypeVar("T")


class Team(Generic[T]):
    """``threads`` threads with a :class:`Staging` of their own each, for one job.

    They start, and get their buffers, when the context is entered: page-locked memory takes as long as a plan, and takes
    little of the interpreter's time.  Leaving the context, with or without a job done, ends the threads and gives the buffers back
    before it returns.
    """

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._job: Future[Callable[[Staging], T] | None] = Future()
        self._results: tuple[Future[T | None], ...] = tuple(Future() for _ in range(threads))
        self._pinned: Pinned | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Team[T]:
        if not self._threads:  # whoever has the job enters the context of a team that is ready once more
            try:
                self._start()
            except BaseException:
                self.dismiss()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.dismiss()

    def dismiss(self) -> None:
        """Ends the threads; those without a job, which then will not come, leave as soon as their buffers are there."""
        if not self._job.done():
            self._job.set_result(None)
        for thread in self._threads:
            thread.join()
        if self._pinned is not None:
            self._pinned.release()
            self._pinned = None

    def work(self, job: Callable[[Staging], T], meanwhile: Callable[[], None] = lambda: None) -> list[T]:
        """Runs ``job`` once in every thread, and ``meanwhile`` in this one; returns what each thread has returned.

        Raises:
            Exception: the first error of a thread, its own or one of getting its buffers, as soon as it is known, or that of
                ``meanwhile``.  The others then are still at work: whoever knows the job stops them.
        """
        self._job.set_result(job)
        meanwhile()
        done, _ = wait(self._results, return_when=FIRST_EXCEPTION)
        for result in sorted(done, key=_without_reason):
            result.result()
        found = [result.result() for result in self._results]
        return [result for result in found if result is not None]

    def _start(self) -> None:
        if self._device.type == "cuda":
            self._pinned = Pinned(len(self._results), self._buffer_bytes)
        for number in range(len(self._results)):
            thread = threading.Thread(target=self._answer, args=(number, self._pinned), name=f"rtp_llm-read-{number}")
            thread.start()
            self._threads.append(thread)

    def _answer(self, number: int, pinned: Pinned | None) -> None:
        try:
            self._results[number].set_result(self._run(number, pinned))
        # Whatever it is belongs to the thread that waits.
        except BaseException as error:  # noqa: BLE001
            self._results[number].set_exception(error)
            if pinned is not None:
                pinned.give_up()

    def _run(self, number: int, pinned: Pinned | None) -> T | None:
        with Staging(self._device, self._buffer_bytes, None if pinned is None else pinned.parts[number]) as staging:
            if pinned is not None:
                pinned.touch(number)
            job = self._job.result()
            if job is None:
                return None
            if pinned is not None:
                pinned.wait()
            return job(staging)


def _without_reason(result: Future[Any]) -> bool:
    """Whether a thread ended because another one could not give it what it waited for."""
    return isinstance(result.exception(), CancelledError)
