"""Runs of a file that lie apart, copied out of the page cache by the kernel, without what lies between them.

A rank's part of a row-parallel matrix is a piece of every row.  ``preadv`` has to copy the other ranks' pieces too, or to be called for
each row.  Through a map of the file only the wanted bytes are touched; but a file that is cut while it is mapped kills whoever
loads from the map (SIGBUS).  So the process does not: ``process_vm_writev(2)``, from the map to its own memory, has the kernel load,
which ends in ``EFAULT`` instead, and takes up to 1,024 runs a call.

Only what is cached is copied in this way: page faults read ahead worse than reads do.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from types import TracebackType

import numpy as np

#: Linux takes at most so many pieces in one call (UIO_MAXIOV).
_MAX_RUNS = 1024
#: Bytes of a stretch for each place of it that is asked for: files are read, and dropped, in longer pieces.
_SAMPLE_BYTES = 4 << 20


class Mapped:
    """An open file of ``size`` bytes, mapped to be read; the descriptor stays its owner's."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address: int = self._bytes.ctypes.data
        self._probe = bytearray(1)
        self._call = _process_vm_writev()

    def __enter__(self) -> Mapped:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is mapped any more."""
        del self._bytes  # an exported buffer would keep the map from being closed
        self._map.close()

    def gather(self, start: int, stride: int, length: int, into: memoryview) -> bool:
        """Fills ``into``, a multiple of ``length`` bytes, with runs of ``length`` bytes, ``stride`` apart, from byte ``start`` of the file.

        Returns whether that was done.  If not, whoever reads the file learns why: it is not cached, or cut, or the disk has an error, or
        this kernel (or what guards this container) does not allow the call; ``into`` may hold anything then.
        """
        count = len(into) // length
        if self._call is None or not self._cached(start, start + (count - 1) * stride + length):
            return False
        runs = np.empty((min(count, _MAX_RUNS), 2), np.uint64)
        runs[:, 1] = length
        source, target = self._address + start, np.frombuffer(into, np.uint8).ctypes.data
        steps = np.arange(len(runs), dtype=np.uint64) * np.uint64(stride)
        for first in range(0, count, _MAX_RUNS):
            some = min(_MAX_RUNS, count - first)
            np.add(steps[:some], np.uint64(source + first * stride), out=runs[:some, 0])
            place = np.array((target + first * length, some * length), np.uint64)
            if self._call(os.getpid(), runs.ctypes.data, some, place.ctypes.data, 1, 0) != some * length:
                return False
        return True

    def _cached(self, start: int, stop: int) -> bool:
        """Whether a stretch is in the page cache, by samples: reads that are to fail rather than wait for the disk."""
        try:
            places = (*range(start, stop, _SAMPLE_BYTES), stop - 1)
            return all(os.preadv(self._descriptor, [self._probe], place, os.RWF_NOWAIT) == 1 for place in places)
        except OSError:  # it would wait, or the file system cannot tell (preadv2(2))
            return False


def _process_vm_writev() -> ctypes._NamedFuncPointer | None:
    """The call of the C library; None where there is none."""
    call = getattr(ctypes.CDLL(None), "process_vm_writev", None)
    if call is not None:
        pointer, number = ctypes.c_void_p, ctypes.c_ulong
        call.argtypes = (ctypes.c_int, pointer, number, pointer, number, number)
        call.restype = ctypes.c_ssize_t
    return call
