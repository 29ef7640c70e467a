"""The file system of a path, and how much of a file is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: File systems over a network, or in another process: reads through a memory map can end in SIGBUS there.
NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "9p", "virtiofs", "afs", "fuse", "hf3fs"}
)

#: Bytes of a file in one mincore() call: its answer takes a byte for each page, 64 KiB for 256 MiB.
_WINDOW = 256 << 20

#: An estimate samples 8 MiB of a file: files are read in order, so cached pages lie together.
_SAMPLES = 8
_SAMPLE_BYTES = 1 << 20

#: Of each page's byte only the lowest bit is defined.
_LOWEST_BIT = bytes(byte & 1 for byte in range(256))


@dataclass(frozen=True, slots=True)
class FileSystem:
    """``kind``: the kernel's name of the file system.  ``network``: whether it is in :data:`NETWORK`."""

    mount_point: str
    kind: str
    network: bool


def file_system(path: Path) -> FileSystem | None:
    """The file system that ``path`` lies on, by the longest mount point; None where the kernel does not list it."""
    real = os.path.realpath(path)
    best: FileSystem | None = None
    # Format: proc(5), /proc/pid/mountinfo; white space in names is octal.
    for line in _read("/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        mount_point = re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), left.split(" ")[4])
        inside = real == mount_point or real.startswith(mount_point.rstrip("/") + "/")
        # Of equal mount points the last one is on top.
        if inside and (best is None or len(mount_point) >= len(best.mount_point)):
            kind = right.split(" ")[0]
            best = FileSystem(mount_point, kind, any(part in NETWORK for part in kind.split(".")))
    return best


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or hidden in this container
        return ""


def cached_bytes(path: Path) -> int | None:
    """Bytes of a file in the page cache, by mincore(2), without touching it; None where the call is missing or fails."""
    return _looked_at(path, lambda length: [(start, min(_WINDOW, length - start)) for start in range(0, length, _WINDOW)])


def estimated_cached_bytes(path: Path) -> int | None:
    """The same from a few samples across the file: all pages of 16 GB take a tenth of a second, a quarter of the load."""

    def samples(length: int) -> list[tuple[int, int]]:
        if length <= _SAMPLES * _SAMPLE_BYTES:
            return [(0, length)] if length else []
        last = (length - _SAMPLE_BYTES) // mmap.ALLOCATIONGRANULARITY
        return [(last * i // (_SAMPLES - 1) * mmap.ALLOCATIONGRANULARITY, _SAMPLE_BYTES) for i in range(_SAMPLES)]

    return _looked_at(path, samples)


def _looked_at(path: Path, windows_of: Callable[[int], list[tuple[int, int]]]) -> int | None:
    """The cached bytes of a file, estimated from windows (start, length) of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore"):
        return None
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    resident = seen = 0
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for start, length in windows_of(size):
            pages = _resident_pages(libc, file.fileno(), start, length)
            if pages is None:
                return None
            resident += min(pages * mmap.PAGESIZE, length)
            seen += length
    return size * resident // seen if seen else 0


def _resident_pages(libc: ctypes.CDLL, descriptor: int, start: int, length: int) -> int | None:
    # A private mapping is writable, which ctypes needs for an address, and is never written to.
    with mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=start) as mapping:
        first = ctypes.c_char.from_buffer(mapping)
        answer = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
        failed = libc.mincore(ctypes.addressof(first), length, answer)
        del first  # an exported buffer would keep the mapping from being closed
        return None if failed else answer.raw.translate(_LOWEST_BIT).count(1)
