"""The page cache before a run: everything in it, or nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rtp_llm.transport.pagecache import cached_bytes

#: Bytes of one read that fills the cache: large enough that system calls take no time.
_BLOCK = 16 << 20
#: Files read at once; more do not make a disk faster, and the first pass waits for the disk.
_THREADS = 4
#: The part of the files that may stay cached after eviction: the kernel keeps pages in use elsewhere.
_LEFT = 0.01
#: Below this part of the files a warm run is not warm: the memory is too small for them.
WARM_ENOUGH = 0.99

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class Eviction:
    """The result of an eviction: ``how`` pages were dropped, the bytes ``left`` in the cache, and the ``reason`` if the files are
    not cold."""

    how: str
    left: int
    reason: str | None = None


def resident(files: Sequence[Path]) -> int | None:
    """Bytes of ``files`` in the page cache; None where the kernel does not tell."""
    found = [cached_bytes(file) for file in files]
    return None if None in found else sum(n for n in found if n is not None)


def warm(files: Sequence[Path]) -> None:
    """Reads every file once, so that the page cache has what fits."""
    with ThreadPoolExecutor(_THREADS, "rtp_llm-warm") as pool:
        list(pool.map(_read, files))


def _read(file: Path) -> None:
    block = memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(block):
            pass


def evict(files: Sequence[Path], *, drop_caches: bool = False) -> Eviction:
    """Removes ``files`` from the page cache and checks with mincore(2).

    ``POSIX_FADV_DONTNEED`` drops the pages of these files alone.  If that is not enough and ``drop_caches`` is set, the page
    cache of the whole machine is dropped, which takes root.
    """
    for file in files:
        with file.open("rb") as stream:
            # Dirty pages cannot be dropped.
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    how, left = "posix_fadvise(DONTNEED)", resident(files)
    most = int(_LEFT * sum(file.stat().st_size for file in files))
    if left is not None and left > most and drop_caches:
        try:
            _DROP_CACHES.write_text("1")  # clean pages of all files; 2 and 3 would drop directory entries as well
        except OSError as error:
            return Eviction(how, left, f"{left} bytes are still cached, and {_DROP_CACHES} cannot be written: {error.strerror}")
        how, left = f"{_DROP_CACHES}", resident(files)
    if left is None:
        return Eviction(how, 0, "the kernel does not tell what is cached (no mincore)")
    if left > most:
        return Eviction(how, left, f"mincore still finds {left} bytes cached")
    return Eviction(how, left)
