"""A pool of reader threads, which start while the load is still planned."""

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


class ReaderPool(Generic[T]):
    """``threads`` threads, each with a :class:`Staging`, for one job.

    Entering the context starts them and allocates their buffers: page-locking takes as long as planning, and little of the
    interpreter's time.  For a GPU they run on CPUs of its NUMA node.  Leaving the context ends the threads and frees the buffers
    before it returns.

    SimpleQueue, not Lock: Ctrl-C inside a Python lock can leave it held.
    """

    def __init__(self, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._size, self._over = threads, False
        self._jobs: SimpleQueue[Callable[[Staging], T] | None] = SimpleQueue()  # each thread takes one
        self._ended: SimpleQueue[Future[T | None]] = SimpleQueue()
        self._pinned: Pinned | None = None
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> ReaderPool[T]:
        if not self._threads:  # the transport enters the context of a pool that has started already
            try:
                self._start()
            # An interrupt too: __exit__ does not run after a failed __enter__.
            except BaseException as error:
                self._leave(error)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Ends the pool.  A failure to do so is logged if an ``error`` came first, else raised."""
        try:
            self.dismiss()
        except RuntimeError as failure:  # CUDA's
            if error is None:
                raise
            _log.warning("the reader threads' buffers could not be freed: %s", failure)

    def dismiss(self) -> None:
        """Ends the threads; those that wait for a job end once their buffers are allocated."""
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
            Exception: the first error of a thread (of the job, or of its buffers), at once; or that of ``meanwhile``.  The other
                threads still run: the caller stops their job.
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
        # Every error belongs to the waiting thread.
        except BaseException as error:  # noqa: BLE001
            ended.set_exception(error)
            self._ended.put(ended)
            # After the error is queued: errors of threads that give_up wakes come later.
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
