"""The page cache before a run is what the run says it was: asked of the kernel, not believed."""

from __future__ import annotations

from pathlib import Path

from rtp_llm.bench.cache import evict, resident, warm
from rtp_llm.transport.pagecache import cached_bytes


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def test_cold_means_that_mincore_finds_nothing(checkpoint: Path) -> None:
    """After eviction no page of the files is cached; files that were just written are written out first."""
    files = files_of(checkpoint)
    warm(files)
    done = evict(files)
    assert done.reason is None and done.left == 0 and done.how == "posix_fadvise(DONTNEED)"
    assert sum(cached_bytes(file) or 0 for file in files) == 0


def test_warm_means_that_everything_is_cached(checkpoint: Path) -> None:
    """After warming every byte is."""
    files = files_of(checkpoint)
    evict(files)
    warm(files)
    assert resident(files) == sum(file.stat().st_size for file in files)


def test_pages_that_stay_are_told(tmp_path: Path) -> None:
    """A file whose pages something locks in memory is not called cold."""
    import ctypes
    import mmap

    file = tmp_path / "locked"
    file.write_bytes(b"x" * (1 << 20))
    with file.open("r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapping:
        libc = ctypes.CDLL(None, use_errno=True)
        first = ctypes.c_char.from_buffer(mapping)
        address, length = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(mapping))
        assert libc.mlock(address, length) == 0, "this machine does not lock a megabyte"
        done = evict([file])
        libc.munlock(address, length)
        del first
    assert done.left == 1 << 20 and done.reason is not None and "1048576 bytes" in done.reason
