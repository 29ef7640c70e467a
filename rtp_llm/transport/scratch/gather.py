"""Copies evenly spaced runs of a file out of the page cache, without the gaps between them.

A rank's part of a row-parallel matrix is a part of every row.  ``preadv`` copies the other ranks' parts too, or takes a call for
each row.  A map of the file touches only wanted bytes, but loading from the map of a truncated file kills the process (SIGBUS).
So the kernel loads: ``process_vm_writev(2)`` from the map to the process's own memory ends in ``EFAULT`` instead, and takes up to
1,024 runs a call.

Only for cached files: page faults read ahead worse than reads do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType

import numpy as np

#: Linux takes at most so many pieces in one call (UIO_MAXIOV).
_MAX_RUNS = 1024
#: Bytes for each page that is probed: the page cache fills and drops files in longer pieces.
_SAMPLE_BYTES = 4 << 20
#: A read that is to fail rather than wait for the disk (preadv2(2)); None in a Python that was built with an older C library.
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)


class Mapped:
    """An open file of ``size`` bytes, mapped for reading where possible; the caller owns the descriptor."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._bytes = _mapped(descriptor, size)
        self._probe = bytearray(1)
        self._call = _process_vm_writev()

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file."""
        self._bytes = None  # the only reference to the map

    def gather(self, start: int, stride: int, length: int, into: memoryview) -> bool:
        """Fills ``into``, a multiple of ``length`` bytes, with runs of ``length`` bytes, ``stride`` apart, from byte ``start`` of the file.

        Returns False where that is not possible, and ``into`` may hold anything; a read then finds the reason.  The file is not
        cached, not mapped or truncated, the disk has an error, or the kernel or the container forbids the call.

        Raises:
            OSError: the file's size cannot be had.
        """
        count = len(into) // length
        stop = start + (count - 1) * stride + length
        if self._call is None or self._bytes is None or not self._cached(start, stop):
            return False
        runs = np.empty((min(count, _MAX_RUNS), 2), np.uint64)
        runs[:, 1] = length
        source, target = self._bytes.ctypes.data + start, np.frombuffer(into, np.uint8).ctypes.data
        steps = np.arange(len(runs), dtype=np.uint64) * np.uint64(stride)
        for first in range(0, count, _MAX_RUNS):
            some = min(_MAX_RUNS, count - first)
            np.add(steps[:some], np.uint64(source + first * stride), out=runs[:some, 0])
            place = np.array((target + first * length, some * length), np.uint64)
            if self._call(os.getpid(), runs.ctypes.data, some, place.ctypes.data, 1, 0) != some * length:
                return False
        # The rest of the last page of a truncated file reads as zeros.
        return os.fstat(self._descriptor).st_size >= stop

    def _cached(self, start: int, stop: int) -> bool:
        """Whether bytes ``[start, stop)`` are in the page cache, by samples."""
        if _NOWAIT is None:
            return False
        try:
            places = (*range(start, stop, _SAMPLE_BYTES), stop - 1)
            return all(os.preadv(self._descriptor, [self._probe], place, _NOWAIT) == 1 for place in places)
        except OSError:  # it would wait, or the file system does not support the flag (preadv2(2))
            return False


def _mapped(descriptor: int, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]] | None:
    """A file's bytes; None where mapping fails, though reads may not: no maps in the file system, no address space or descriptor
    left (mmap keeps one of its own), or a file that is shorter by now."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError):
        return None


def _process_vm_writev() -> ctypes._NamedFuncPointer | None:
    """The call of the C library; None where there is none."""
    call = getattr(ctypes.CDLL(None), "process_vm_writev", None)
    if call is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = (ctypes.c_int, pointer, number, pointer, number, number)
        call.restype = ctypes.c_ssize_t
    return call
