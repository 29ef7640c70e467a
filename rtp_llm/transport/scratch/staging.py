"""Host buffers of one reader thread: plain memory for the CPU, a pinned pair with a stream of its own for CUDA."""

from __future__ import annotations

import mmap
import resource
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import torch

from rtp_llm.errors import Problem, TransportError
from rtp_llm.transport.faults import TransportFault

#: Pinned buffers a thread: one is read into while the other one's copy is on its way.
CUDA_BUFFERS = 2

#: Size of a huge page on x86-64, and on ARM with 4 KiB pages.
_HUGE_PAGE = 2 << 20


def staging_bytes(device_type: str, threads: int, buffer_bytes: int) -> int:
    """What all threads' buffers take on the host, and at most on the device for parts that are cast or gathered there."""
    return threads * buffer_bytes * (CUDA_BUFFERS if device_type == "cuda" else 1)


@dataclass(slots=True)
class Slot:
    """A buffer: as a flat ``uint8`` tensor, as bytes to read into, and the lists of its parts that were read into before,
    by (length of a run, gap)."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None = None
    bytes: memoryview = field(init=False)
    combs: dict[tuple[int, int], list[memoryview]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bytes = self.tensor.numpy().data


class Staging:
    """Hands out buffers.  On the CPU there is one, allocated on first use, since a load that goes straight into parameters needs
    none; for CUDA there are :data:`CUDA_BUFFERS`, made by :meth:`prepare` or on first use.

    Within its context the thread's current stream is one of its own.
    """

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self._slots: list[Slot] = []
        self._pinned: _Pinned | None = None
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._current = torch.cuda.stream(self._stream)  # does nothing for None

    def __enter__(self) -> Staging:
        self._current.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self._stream is not None:
                self._stream.synchronize()
        finally:
            self._current.__exit__(kind, error, trace)
            self._slots.clear()
            if self._pinned is not None:
                self._pinned.release()

    def prepare(self) -> None:
        """Makes the buffers that every load needs, ahead of it."""
        if self._stream is not None and not self._slots:
            self._make()

    def take(self, nbytes: int) -> Slot:
        """A buffer of at least ``nbytes`` whose earlier content has left it; to be given back by :meth:`give`."""
        if nbytes > self._buffer_bytes:
            # A tensor that is read whole: a buffer of its own, gone as soon as it is placed.
            return Slot(torch.empty(nbytes, dtype=torch.uint8))
        slot = self._next()
        if slot.event is not None:
            slot.event.synchronize()
        return slot

    def give(self, slot: Slot) -> None:
        """Ends the use of a buffer.  What is copied from it goes through the current stream, and may still be under way."""
        if slot.event is not None:
            slot.event.record(self._stream)
        elif self._stream is not None:
            self._stream.synchronize()

    def _next(self) -> Slot:
        if not self._slots:
            self._make()
        self._turn = (self._turn + 1) % len(self._slots)
        return self._slots[self._turn]

    def _make(self) -> None:
        if self._stream is None:
            self._slots = [Slot(torch.empty(self._buffer_bytes, dtype=torch.uint8))]
            return
        # All of a thread's buffers at once: each call that locks or unlocks memory waits for those of the other threads.
        self._pinned = _Pinned(CUDA_BUFFERS * self._buffer_bytes)
        parts = torch.split(self._pinned.tensor, self._buffer_bytes)
        self._slots = [Slot(part, torch.cuda.Event()) for part in parts]  # type: ignore[no-untyped-call]


class _Pinned:
    """Page-locked memory made of huge pages, which are touched here, in the thread that will use them, and registered.

    Locking half a gigabyte takes 0.3 s by ``cudaHostAlloc`` and 0.04 s this way with 16 threads (measured on an H200),
    since there are 512 times fewer pages to lock and the threads zero them side by side.

    Raises:
        TransportError: ``LOCK_REFUSED``, where the memory cannot be locked.
    """

    def __init__(self, nbytes: int) -> None:
        self.tensor = in_huge_pages(nbytes)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        try:
            torch.cuda.check_error(int(runtime.cudaHostRegister(self.tensor.data_ptr(), nbytes, 0)))
        except torch.cuda.CudaError as error:
            raise _refused(nbytes, error) from error

    def release(self) -> None:
        """Unlocks the memory; nothing may be copying from it."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostUnregister(self.tensor.data_ptr())))


def _refused(nbytes: int, error: torch.cuda.CudaError) -> TransportError:
    # CUDA says "out of memory" whoever set the limit, be it the process's, a container's or the driver's own.
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    problem = Problem(
        TransportFault.LOCK_REFUSED,
        "a reader thread's buffers cannot be page-locked",
        expected=f"{nbytes} bytes ({CUDA_BUFFERS} buffers), and as much for each other thread",
        actual=f"cudaHostRegister: {error}; the process's own limit (RLIMIT_MEMLOCK, ulimit -l) is {limit}",
        fix="take fewer --reader_threads or a smaller --buffer_mib; or raise the limit: ulimit -l, a container's memory and memlock"
        " (docker run --ulimit memlock=-1), or that of the virtual machine",
    )
    return TransportError(problem)


def in_huge_pages(nbytes: int) -> torch.Tensor:
    """``uint8`` memory of its own, in huge pages where the system has some, all of which are there: touched by this thread."""
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them (madvise(2), EINVAL)
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    skip = -memory.data_ptr() % _HUGE_PAGE
    tensor = memory[skip : skip + nbytes]
    # A byte of each page, by numpy: zero_ would start as many threads as there are CPUs for each thread that calls it.
    tensor.numpy()[:: mmap.PAGESIZE] = 0
    return tensor
