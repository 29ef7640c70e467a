"""Reader threads, which get ready while others still plan what they are to read."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, TypeVar

import torch

from rtp_llm.errors import TransportError, internal
from rtp_llm.transport.faults import TransportFault
from rtp_llm.transport.scratch.numa import near_cpus
from rtp_llm.transport.scratch.staging import Pinned, Staging

T = TypeVar("T")

_log = logging.getLogger("rtp_llm.transport")


class Team(Generic[T]):
    """``threads`` threads with a :class:`Staging` of their own each, for one job.

    They start, and get their buffers, when the context is entered: page-locked memory takes as long as a plan, and takes
    little of the interpreter's time.  Beside a GPU they stay on CPUs of its NUMA node.  Leaving the context, with or without a job
    done, ends the threads and gives the buffers back before it returns.

    Threads and their owner share queues alone, whose calls are whole for an interrupt: of a lock of Python's it could make one that
    stays locked.
    """

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._size, self._over = threads, False
        self._jobs: SimpleQueue[Callable[[Staging], T] | None] = SimpleQueue()  # each thread takes one
        self._ended: SimpleQueue[Future[T | None]] = SimpleQueue()
        self._pinned: Pinned | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Team[T]:
        if not self._threads:  # whoever has the job enters the context of a team that is ready once more
            try:
                self._start()
            # An interrupt too: nobody leaves a context that was not entered.
            except BaseException as error:
                self._leave(error)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Ends the team; that this fails as well is told, and hides no ``error`` that came first."""
        try:
            self.dismiss()
        except RuntimeError as failure:  # CUDA's
            if error is None:
                raise
            _log.warning("the reader threads' buffers could not be given back: %s", failure)

    def dismiss(self) -> None:
        """Ends the threads; those without a job, which then will not come, leave as soon as their buffers are there."""
        self._over = True
        for _ in range(self._size):
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            pinned.release()

    def work(self, job: Callable[[Staging], T], meanwhile: Callable[[], None] = lambda: None) -> list[T]:
        """Runs ``job`` once in every thread, and ``meanwhile`` in this one; returns what each thread has returned.

        Raises:
            Exception: the first error of a thread, its own or one of getting its buffers, as soon as it is known, or that of
                ``meanwhile``.  The others then are still at work: whoever knows the job stops them.
        """
        if self._over:
            raise TransportError(internal(TransportFault.INTERNAL, "reader threads are given a second job"))
        self._over = True
        for _ in range(self._size):
            self._jobs.put(job)
        meanwhile()
        found = [self._ended.get().result() for _ in range(self._size)]
        return [result for result in found if result is not None]

    def _start(self) -> None:
        near = None
        if self._device.type == "cuda":
            self._pinned, near = Pinned(self._size, self._buffer_bytes), near_cpus(self._device)
        for number in range(self._size):
            thread = threading.Thread(target=self._answer, args=(number, self._pinned, near), name=f"rtp_llm-read-{number}")
            thread.start()
            self._threads.append(thread)

    def _answer(self, number: int, pinned: Pinned | None, near: frozenset[int] | None) -> None:
        ended: Future[T | None] = Future()
        try:
            if near is not None:
                os.sched_setaffinity(0, near)  # of this thread (sched_setaffinity(2))
            ended.set_result(self._run(number, pinned))
        # Whatever it is belongs to the thread that waits.
        except BaseException as error:  # noqa: BLE001
            ended.set_exception(error)
            self._ended.put(ended)
            # After its error, which is so told before those of threads that then wait no longer.
            if pinned is not None:
                pinned.give_up()
        else:
            self._ended.put(ended)

    def _run(self, number: int, pinned: Pinned | None) -> T | None:
        with Staging(self._device, self._buffer_bytes, None if pinned is None else pinned.parts[number]) as staging:
            if pinned is not None:
                pinned.touch(number)
            job = self._jobs.get()
            if job is None:
                return None
            if pinned is not None:
                pinned.wait()
            return job(staging)
