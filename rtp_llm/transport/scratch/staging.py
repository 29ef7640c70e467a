"""Host buffers of one reader thread: plain memory for the CPU, a pinned pair with a stream of its own for CUDA."""

from __future__ import annotations

import logging
import mmap
import resource
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch

from rtp_llm.errors import Problem, TransportError
from rtp_llm.transport.faults import TransportFault

_log = logging.getLogger("rtp_llm.transport")

#: Pinned buffers a thread: one is filled while the other one is copied.
CUDA_BUFFERS = 2

#: Size of a huge page on x86-64, and on ARM with 4 KiB pages.
_HUGE_PAGE = 2 << 20


def staging_bytes(device_type: str, threads: int, buffer_bytes: int) -> int:
    """Bytes of all threads' buffers on the host; parts that are cast or gathered on the device take at most as much there."""
    return threads * buffer_bytes * (CUDA_BUFFERS if device_type == "cuda" else 1)


@dataclass(slots=True)
class PinnedBuffer:
    """A buffer, pinned for CUDA: as a flat ``uint8`` tensor, and as bytes to read into.  ``buffer_lists``: its parts for earlier
    strided reads, by (length of a run, gap)."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None
    bytes: memoryview = field(init=False)
    buffer_lists: dict[tuple[int, int], list[memoryview]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bytes = self.tensor.numpy().data


class Staging:
    """One thread's buffers.  CPU: one, allocated on first use, since reads straight into parameters need none.  CUDA:
    :data:`CUDA_BUFFERS`, in ``pinned`` memory.

    Inside its context the thread has a CUDA stream of its own.
    """

    def __init__(self, device: torch.device, buffer_bytes: int, pinned: torch.Tensor | None = None) -> None:
        self._buffer_bytes = buffer_bytes
        self._buffers: list[PinnedBuffer] = []
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._current = torch.cuda.stream(self._stream)  # does nothing for None
        if pinned is not None:
            parts = torch.split(pinned, buffer_bytes)[:CUDA_BUFFERS]
            self._buffers = [PinnedBuffer(part, torch.cuda.Event()) for part in parts]  # type: ignore[no-untyped-call]

    def __enter__(self) -> Staging:
        self._current.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        except RuntimeError as failure:  # CUDA's, which hides no error that came first
            if error is None:
                raise
            _log.warning("copies to the GPU did not end: %s", failure)
        finally:
            self._current.__exit__(kind, error, trace)
            self._buffers.clear()

    def take(self, nbytes: int) -> PinnedBuffer:
        """A buffer of at least ``nbytes``, free of earlier copies; return it by :meth:`give`."""
        if nbytes > self._buffer_bytes:
            # A tensor that is read whole has a buffer of its own, freed once it is placed.
            return PinnedBuffer(torch.empty(nbytes, dtype=torch.uint8))
        if not self._buffers:
            self._buffers = [PinnedBuffer(torch.empty(self._buffer_bytes, dtype=torch.uint8))]
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        if buffer.event is not None:
            buffer.event.synchronize()
        return buffer

    def give(self, buffer: PinnedBuffer) -> None:
        """Returns a buffer.  Copies from it may still be queued on the current stream."""
        if buffer.event is not None:
            buffer.event.record(self._stream)
        elif self._stream is not None:
            self._stream.synchronize()


class Pinned:
    """Page-locked memory of a pool, in huge pages: each thread touches its part, and the last one locks all of it.

    Locking half a gigabyte takes 0.3 s by ``cudaHostAlloc`` and 0.04 s this way with 16 threads (measured on an H200): there are
    512 times fewer pages to lock, and threads zero them side by side.  One call locks all, since such calls wait for each other.
    """

    def __init__(self, threads: int, buffer_bytes: int) -> None:
        part_bytes = -(-CUDA_BUFFERS * buffer_bytes // _HUGE_PAGE) * _HUGE_PAGE
        self._tensor = _huge_pages(threads * part_bytes)
        self.parts: tuple[torch.Tensor, ...] = torch.split(self._tensor, part_bytes)
        self._untouched = threads
        self._lock = threading.Lock()
        self._locked: Future[None] = Future()

    def touch(self, number: int) -> None:
        """Allocates the pages of part ``number``; each thread calls it once, for its own."""
        _touch(self.parts[number])
        with self._lock:
            self._untouched -= 1
            if self._untouched:
                return
        if not self._locked.set_running_or_notify_cancel():
            return
        try:
            self._register()
        # The threads that wait for it raise it.
        except BaseException as error:  # noqa: BLE001
            self._locked.set_exception(error)
        else:
            self._locked.set_result(None)

    def give_up(self) -> None:
        """Called by a thread that will not touch its part: ends the wait of the others."""
        self._locked.cancel()

    def wait(self) -> None:
        """Waits until all is locked.

        Raises:
            TransportError: ``LOCK_REFUSED``.
            CancelledError: a thread gave up; its own error is the cause.
        """
        self._locked.result()

    def release(self) -> None:
        """Unlocks the memory, or prevents a later lock; no copy from it may be under way."""
        if not self._locked.cancel() and self._locked.exception() is None:
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())))  # type: ignore[no-untyped-call]

    def _register(self) -> None:
        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(int(runtime.cudaHostRegister(self._tensor.data_ptr(), self._tensor.numel(), 0)))
        except torch.cuda.CudaError as error:
            raise _refused(self._tensor.numel(), len(self.parts), error) from error


def _refused(nbytes: int, threads: int, error: torch.cuda.CudaError) -> TransportError:
    # CUDA reports "out of memory" for every limit: the process's, a container's, or the driver's own.
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    problem = Problem(
        TransportFault.LOCK_REFUSED,
        "the reader threads' buffers cannot be page-locked",
        expected=f"{nbytes} bytes ({CUDA_BUFFERS} buffers for each of {threads} threads)",
        actual=f"cudaHostRegister: {error}; the process's own limit (RLIMIT_MEMLOCK, ulimit -l) is {limit}",
        fix="take fewer --reader_threads or a smaller --buffer_mib; or raise the limit: ulimit -l, a container's memory and memlock"
        " (docker run --ulimit memlock=-1), or that of the virtual machine",
    )
    return TransportError(problem)


def in_huge_pages(nbytes: int) -> torch.Tensor:
    """New ``uint8`` memory, in huge pages where the system has some, touched by this thread."""
    memory = _huge_pages(nbytes)
    _touch(memory)
    return memory


def _huge_pages(nbytes: int) -> torch.Tensor:
    """Memory that becomes huge pages as it is touched."""
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them (madvise(2), EINVAL)
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    skip = -memory.data_ptr() % _HUGE_PAGE
    return memory[skip : skip + nbytes]


def _touch(memory: torch.Tensor) -> None:
    # A byte of each page, by numpy: zero_ would start a thread for each CPU, in every caller.
    memory.numpy()[:: mmap.PAGESIZE] = 0
