"""The limits of the machine, measured in the same run: a loader can only be faster by reading less.

``python -m rtp_llm.bench.limits warm|cold CKPT --device cuda:0`` prints one JSON line: for each limit its ``gb_per_s``
(10**9 bytes a second), the ``threads`` that reached it, and what it is.  A limit that cannot be measured has a ``reason``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

#: One read.  Larger ones do not get faster, and each thread keeps a buffer of this size.
_BLOCK = 32 << 20
#: Bytes read for one limit: more do not change the average, and a terabyte would take long.
_MOST = 8 << 30
#: Bytes copied at once to a device: a large copy, so that its launch does not show.
_COPY = 1 << 30
#: O_DIRECT needs offsets, lengths and addresses in whole sectors; a page is enough for every file system in use.
_SECTOR = 4096
#: Repetitions of a limit that takes no disk.
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Limit:
    """One measured limit; ``gb_per_s`` is 0 and ``reason`` says why where it could not be measured."""

    name: str
    what: str
    gb_per_s: float
    threads: int
    reason: str | None = None


def warm_limits(files: Sequence[Path], device: torch.device) -> list[Limit]:
    """Limits with ``files`` in the page cache.  GPU: the copy from pinned memory, and cached reads into it.  CPU: cached reads
    into fresh and into touched memory, and a copy in memory."""
    if device.type == "cuda":
        copy = Limit("pinned_copy", "copy from pinned memory to the device", _pinned_copy(device), 1)
        return [copy, _best("cached_read", "cached reads into pinned memory", _thread_counts(), lambda n: _reused(files, n, pinned=True))]
    return [
        _best("fresh_read", "cached reads into memory not touched before", _thread_counts(), lambda n: _fresh(files, n)),
        _best("cached_read", "cached reads into memory touched before", _thread_counts(), lambda n: _reused(files, n, pinned=False)),
        _best("memory_copy", "copy in memory", _thread_counts(), _memory_copy),
    ]


def cold_limits(files: Sequence[Path]) -> list[Limit]:
    """Reads around the page cache (O_DIRECT): what the disk gives."""
    what = "reads around the page cache"
    threads = max(_thread_counts())
    try:
        return [Limit("direct_read", what, _direct(files, threads), threads)]
    except OSError as error:
        return [Limit("direct_read", what, 0.0, threads, f"O_DIRECT: {error.strerror}")]


def _thread_counts() -> list[int]:
    """One thread a CPU, and half of that: which is faster depends on what else the cores share."""
    cpus = len(os.sched_getaffinity(0))
    return sorted({cpus, max(1, cpus // 2)})


def _best(name: str, what: str, counts: Sequence[int], measure: Callable[[int], float]) -> Limit:
    # Medians, as for the loads: the best of several would be a matter of luck.
    speeds = {count: statistics.median(measure(count) for _ in range(_RUNS)) for count in counts}
    threads = max(speeds, key=lambda count: speeds[count])
    return Limit(name, what, speeds[threads], threads)


def _pinned_copy(device: torch.device) -> float:
    source = torch.empty(_COPY, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_COPY, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()  # the first one pays for what is set up once
    return _COPY / 1e9 / statistics.median(_seconds(copy) for _ in range(_RUNS))


def _memory_copy(threads: int) -> float:
    share = _COPY // 4 // threads
    pairs = [(torch.ones(share, dtype=torch.uint8).numpy(), torch.zeros(share, dtype=torch.uint8).numpy()) for _ in range(threads)]

    def copy(index: int) -> None:
        target, source = pairs[index]
        target[:] = source  # numpy, unlike torch, copies with the calling thread alone, and without the interpreter's lock

    return share * threads / 1e9 / _seconds(lambda: _in_threads(threads, copy))


def _reused(files: Sequence[Path], threads: int, *, pinned: bool) -> float:
    """Cached reads into one buffer a thread, too large for a CPU's caches to keep."""
    buffers = [torch.ones(_BLOCK, dtype=torch.uint8, pin_memory=pinned) for _ in range(threads)]
    views = [b.numpy().data for b in buffers]
    return _read_all(files, threads, os.O_RDONLY, lambda worker, _, length: views[worker][:length])


def _fresh(files: Sequence[Path], threads: int) -> float:
    """Cached reads into fresh memory, as an allocator gives it for weights: each page is touched for the first time."""
    memory = torch.empty(sum(n for *_, n in _blocks(files)), dtype=torch.uint8).numpy().data
    return _read_all(files, threads, os.O_RDONLY, lambda _, start, length: memory[start : start + length])


def _direct(files: Sequence[Path], threads: int) -> float:
    buffers = [mmap.mmap(-1, _BLOCK) for _ in range(threads)]  # pages, so aligned
    views = [memoryview(b) for b in buffers]
    return _read_all(files, threads, os.O_RDONLY | os.O_DIRECT, lambda worker, _, length: views[worker][: -(-length // _SECTOR) * _SECTOR])


def _blocks(files: Sequence[Path]) -> Iterator[tuple[int, int, int]]:
    """``(file index, offset, length)`` of the blocks that are read for a limit."""
    left = _MOST
    for index, file in enumerate(files):
        size = file.stat().st_size
        for offset in range(0, size, _BLOCK):
            length = min(_BLOCK, size - offset, left)
            if length <= 0:
                return
            yield index, offset, length
            left -= length


def _read_all(files: Sequence[Path], threads: int, flags: int, place: Callable[[int, int, int], memoryview]) -> float:
    """GB/s of reading all blocks; ``place(worker, position, length)`` is where a block goes."""
    descriptors = [os.open(file, flags | os.O_CLOEXEC) for file in files]
    lock, blocks, position = threading.Lock(), _blocks(files), 0

    def work(worker: int) -> None:
        nonlocal position
        while True:
            with lock:
                block = next(blocks, None)
                if block is None:
                    return
                index, offset, length = block
                start, position = position, position + length
            into, got = place(worker, start, length), 0
            while got < length:
                count = os.preadv(descriptors[index], [into[got:]], offset + got)
                if count == 0:
                    raise OSError(0, "a file became shorter", str(files[index]))
                got += count

    try:
        seconds = _seconds(lambda: _in_threads(threads, work))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return position / 1e9 / seconds


def _in_threads(threads: int, work: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(threads, "rtp_llm-limit") as pool:
        list(pool.map(work, range(threads)))


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return max(time.perf_counter() - start, 1e-9)


def main(argv: Sequence[str] | None = None) -> int:
    from rtp_llm.checkpoint import read_catalog

    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.limits", description=__doc__)
    parser.add_argument("state", choices=("warm", "cold"), help="what holds of the page cache")
    parser.add_argument("checkpoint", type=Path, help="a checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    options = parser.parse_args(argv)
    files = [options.checkpoint / f.name for f in read_catalog(options.checkpoint).files]
    found = warm_limits(files, torch.device(options.device)) if options.state == "warm" else cold_limits(files)
    print(json.dumps([asdict(limit) for limit in found]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
