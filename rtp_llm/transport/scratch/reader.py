"""The own reader: threads that pread a plan's byte ranges straight into the final parameters.

On the CPU, bytes that the parameter stores as the file does are read right into it: no buffer, no copy.  Everything else
(another dtype, a permutation, a CUDA device) goes through a small staging buffer of the thread (for CUDA two, pinned).  So host
memory is at most ``threads * buffers * buffer_bytes``, whatever the model's size.  Only a tensor that an op cannot pass in parts
is held whole, one at a time; the plan counts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from types import TracebackType

import numpy as np
import torch

from rtp_llm.collector import collector_paused
from rtp_llm.plan.budget import ReaderLimits
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.interface import Place, Progress, Sink, TransferStats
from rtp_llm.transport.scratch.blocks import (
    MAX_OVERREAD,
    MAX_RUNS,
    Block,
    ContiguousRead,
    Extent,
    ReadBatch,
    StridedRead,
    Work,
    spans_of,
    work_of,
)
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.pool import ReaderPool
from rtp_llm.transport.scratch.scatter import cut, scatter
from rtp_llm.transport.scratch.staging import Staging
from rtp_llm.transport.stored import as_stored

#: From this many parts on, a block goes to the device in one transfer and is scattered there.  A transfer for each part costs about
#: 10 microseconds of a thread's time, as much as 400 KB on the link.
_ONE_TRANSFER = 4

#: A strided read of a smaller span is read with its gaps: calls that leave them out take 20 microseconds and more.
_SIEVED_BYTES = 16 << 10

#: After each of this many first pieces the interpreter's lock is offered; readers would otherwise get it 5 ms later.
_FIRST = 32

#: Bytes that a thread places between two reports of progress: a fiftieth of a second at 3 GB/s.
_PROGRESS_BYTES = 64 << 20


class ScratchTransport:
    """``deliver`` by reader threads with staging buffers, within ``limits``.

    ``pool``: threads that are ready, with buffers of that size; it can be used once.
    """

    name = "scratch"

    def __init__(self, directory: str, device: torch.device, limits: ReaderLimits, pool: ReaderPool[TransferStats] | None = None) -> None:
        self._directory, self._device, self._limits, self._pool = directory, device, limits, pool

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> TransferStats:
        work, limits = _Work(), self._limits
        whole = threading.Lock()

        def read(staging: Staging) -> TransferStats:
            files = Files(self._directory, plan.catalog.files)
            return _Reader(files, sink, progress, self._device, limits, whole).run(work, check, staging)

        def prepare() -> None:
            with collector_paused():
                work.fill(work_of(plan, sink.direct, limits.buffer_bytes, limits.gap_bytes))

        with self._pool or ReaderPool[TransferStats](self._device, limits.threads, limits.buffer_bytes) as pool:
            try:
                moved = pool.work(read, prepare)
            finally:  # after an error of one thread, or an interrupt here, the others stop at their next piece
                work.stop()
                sink.stop()
        return TransferStats(
            bytes_read=sum(m.bytes_read for m in moved),
            bytes_copied=sum(m.bytes_copied for m in moved),
            slow_path=sum(not d.passes for d in plan.deliveries),
            bytes_placed=sum(m.bytes_placed for m in moved),
        )


class _Work:
    """A queue of pieces in file order: readers take the first ones while later ones are still prepared.

    Each reader works within its context; an error in one ends the work of all.

    SimpleQueue, not Lock: Ctrl-C inside a Python lock can leave it held.
    """

    def __init__(self) -> None:
        self._pieces: SimpleQueue[Work | None] = SimpleQueue()
        self._stopped = False

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.stop()

    def fill(self, pieces: Iterator[Work]) -> None:
        """Queues all pieces, then the end."""
        for number, piece in enumerate(pieces):
            if self._stopped:
                return
            self._pieces.put(piece)
            if number < _FIRST:
                time.sleep(0)
        self._pieces.put(None)

    def next(self) -> Work | None:
        piece = self._pieces.get()
        if piece is None or self._stopped:
            self._pieces.put(None)  # for the next reader
            return None
        return piece

    def stop(self) -> None:
        """Ends the queue: readers finish their present piece."""
        self._stopped = True
        self._pieces.put(None)


class _Reader:
    """One thread's loop."""

    def __init__(
        self,
        files: Files,
        sink: Sink,
        progress: Progress,
        device: torch.device,
        limits: ReaderLimits,
        whole: threading.Lock,
    ) -> None:
        self._files, self._sink, self._progress = files, sink, progress
        self._device, self._limits, self._whole = device, limits, whole
        self._scrap = memoryview(bytearray(max(limits.gap_bytes, int(MAX_OVERREAD * limits.buffer_bytes))))
        self._overread = self._copied = 0

    def run(self, work: _Work, check: Callable[[], None], staging: Staging) -> TransferStats:
        placed = reported = 0
        with self._files, work:
            while (piece := work.next()) is not None:
                check()
                if isinstance(piece, Block):
                    self._block(piece, staging)
                elif isinstance(piece, ReadBatch):
                    self._batch(piece, staging)
                elif piece.memory.bytes is not None:
                    self._fill(piece, _final(piece), {})
                else:
                    self._send(piece, staging)
                placed += piece.nbytes
                reported = self._report(placed, reported)
            self._progress.advance(placed - reported)
        return TransferStats(placed + self._overread, self._copied, 0, placed)

    def _report(self, placed: int, reported: int) -> int:
        """Reports progress, not for every piece: showing it takes time and a lock."""
        if placed - reported < _PROGRESS_BYTES:
            return reported
        self._progress.advance(placed - reported)
        return placed

    def _send(self, piece: ContiguousRead | StridedRead, staging: Staging) -> None:
        """Reads into a pinned buffer and copies from there to the flat place on the device."""
        buffer, nbytes = staging.take(piece.nbytes), piece.nbytes
        self._fill(piece, buffer.bytes, buffer.buffer_lists)
        piece.memory.tensor[piece.at : piece.at + nbytes].copy_(buffer.tensor[:nbytes], non_blocking=True)
        staging.give(buffer)
        self._copied += nbytes

    def _fill(self, piece: ContiguousRead | StridedRead, into: memoryview, kept: dict[tuple[int, int], list[memoryview]]) -> None:
        """Reads a piece into the beginning of ``into``.  ``kept``: buffer lists of strided reads by shape, since a list takes
        longer to build than some reads."""
        if isinstance(piece, ContiguousRead):
            self._files.scatter(piece.tensor, piece.start, [into[: piece.nbytes]], piece.nbytes)
            return
        length, gap = piece.length, piece.stride - piece.length
        if piece.span <= min(_SIEVED_BYTES, len(self._scrap)):
            self._sieve(piece, into)
            return
        if self._files.gather(piece.tensor, piece.start, piece.stride, length, into[: piece.nbytes]):
            return
        buffers = kept.get((length, gap), [])
        if len(buffers) < 2 * piece.count:
            scrap = self._scrap[:gap]
            buffers = [b for run in range(piece.count) for b in (into[run * length : (run + 1) * length], scrap)]
            kept[length, gap] = buffers
        for run in range(0, piece.count, MAX_RUNS):
            runs = min(MAX_RUNS, piece.count - run)
            nbytes = runs * piece.stride - gap
            self._files.scatter(piece.tensor, piece.start + run * piece.stride, buffers[2 * run : 2 * (run + runs) - 1], nbytes)
            self._overread += (runs - 1) * gap

    def _sieve(self, piece: StridedRead, into: memoryview) -> None:
        """Reads the whole span of a small strided read, and keeps its runs."""
        span = self._scrap[: piece.span]
        self._files.scatter(piece.tensor, piece.start, [span], piece.span)
        shape = (piece.count, piece.length)
        np.frombuffer(into, np.uint8, piece.nbytes).reshape(shape)[...] = np.ndarray(shape, np.uint8, span, 0, (piece.stride, 1))
        self._overread += piece.span - piece.nbytes

    def _block(self, block: Block, staging: Staging) -> None:
        final = _on_host(block)
        if final is not None:
            self._read(block, final)
            return
        # Wholly staged if any part has to be: mixed blocks are rare and small.
        staged = block.staged
        # A tensor that is held whole: the plan counts one at a time.
        with self._whole if staged > self._limits.buffer_bytes else nullcontext():
            self._place(block, staged, staging)
        self._copied += block.nbytes

    def _place(self, block: Block, staged: int, staging: Staging) -> None:
        """Reads a block into ``staged`` bytes of a staging buffer, and has it placed."""
        buffer, spans = staging.take(staged), spans_of(item.nbytes for item in block.extents)
        self._read(block, [buffer.bytes[at : at + nbytes] for at, nbytes in spans])
        content = buffer.tensor[:staged]
        if self._device.type != "cpu" and len(spans) >= _ONE_TRANSFER:
            content = content.to(self._device, non_blocking=True)
        parts = list(zip(block.extents, block.places, cut(content, spans), strict=True))
        scatter([(place, part) for _, place, part in parts if place is not None])
        others = [(item.part, as_stored(item.part.tensor, item.part.raw_box, part)) for item, place, part in parts if place is None]
        if others:
            self._sink.place_all(others)
        staging.give(buffer)

    def _batch(self, batch: ReadBatch, staging: Staging) -> None:
        """Reads small pieces: on the host each to its place; for a device one after another into a buffer, and from there."""
        if all(piece.memory.bytes is not None for piece in batch.pieces):
            for piece in batch.pieces:
                self._fill(piece, _final(piece), {})
            return
        spans = spans_of(piece.nbytes for piece in batch.pieces)
        staged = sum(spans[-1])
        buffer = staging.take(staged)
        for piece, (at, nbytes) in zip(batch.pieces, spans, strict=True):
            self._fill(piece, buffer.bytes[at : at + nbytes], {})
        # One call, with a transfer for each piece and no device memory: pieces between large tensors are few.
        contents = cut(buffer.tensor[:staged], spans)
        scatter([(Place(piece.memory, piece.at, piece.nbytes), content) for piece, content in zip(batch.pieces, contents, strict=True)])
        staging.give(buffer)
        self._copied += batch.nbytes

    def _read(self, block: Block, places: Sequence[memoryview]) -> None:
        """Reads neighbouring extents by one call, or the runs of a single extent."""
        if len(block.extents) == 1:
            self._read_runs(block.extents[0], places[0])
            return
        first = block.extents[0].first
        buffers: list[memoryview] = []
        at = first
        for item, place in zip(block.extents, places, strict=True):
            if item.first > at:
                buffers.append(self._scrap[: item.first - at])
                self._overread += item.first - at
            buffers.append(place)
            at = item.stop
        self._files.scatter(block.extents[0].part.tensor, first, buffers, at - first)

    def _read_runs(self, item: Extent, place: memoryview) -> None:
        """Reads one part: cached runs without their gaps; else a call for each group of runs, with the gaps inside it."""
        if len(item.runs.steps) == 1:
            (_, stride), *_ = item.runs.steps
            if self._files.gather(item.part.tensor, item.first, stride, item.runs.length, place):
                return
        offsets, length, tensor = item.runs.offsets(), item.runs.length, item.part.tensor
        for first, last in _groups(offsets, length, self._limits.gap_bytes):
            buffers = [place[first * length : (first + 1) * length]]
            for run in range(first + 1, last):
                gap = offsets[run] - offsets[run - 1] - length
                if gap:
                    buffers.append(self._scrap[:gap])
                    self._overread += gap
                buffers.append(place[run * length : (run + 1) * length])
            self._files.scatter(tensor, item.start + offsets[first], buffers, offsets[last - 1] + length - offsets[first])


def _final(piece: ContiguousRead | StridedRead) -> memoryview:
    """The place of a piece on the host."""
    assert piece.memory.bytes is not None
    return piece.memory.bytes[piece.at : piece.at + piece.nbytes]


def _on_host(block: Block) -> list[memoryview] | None:
    """The places of a block's bytes, if all can be read right there."""
    final = []
    for item, place in zip(block.extents, block.places, strict=True):
        if place is None or place.memory.bytes is None:
            return None
        final.append(place.memory.bytes[place.at : place.at + item.nbytes])
    return final


def _groups(offsets: Sequence[int], length: int, most_gap: int) -> Iterator[tuple[int, int]]:
    """The runs of each call, as (first, stop): a group ends at a gap wider than ``most_gap``, or at too many buffers."""
    first = 0
    for run in range(1, len(offsets)):
        if run - first == MAX_RUNS or not 0 <= offsets[run] - offsets[run - 1] - length <= most_gap:
            yield first, run
            first = run
    yield first, len(offsets)
