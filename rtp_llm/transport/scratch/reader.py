"""The own reader: threads that pread a plan's byte ranges straight into the final parameters.

On the CPU bytes that stand in the file as they stand in the parameter are read right into it: no buffer, no copy.
Everything else (another dtype, a permutation, a CUDA device) goes through one small staging buffer a thread (pinned, and
two of them, for CUDA), which bounds host memory by ``threads * buffers * buffer_bytes`` whatever the model's size.  Only
a tensor that an op cannot pass in parts is held whole, one a thread; the plan counts it.
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
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.interface import Moved, Place, Progress, Sink
from rtp_llm.transport.scratch.blocks import MAX_OVERREAD, MAX_RUNS, Block, Bundle, Comb, Extent, Stretch, Work, spans_of, work_of
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.spread import as_stored, cut, spread
from rtp_llm.transport.scratch.staging import Staging
from rtp_llm.transport.scratch.team import Team

#: From this many parts on, a block goes to the device in one transfer and is spread there: a transfer for each part
#: costs about 10 microseconds of a thread's time, as much as 400 KB on the link.
_ONE_TRANSFER = 4

#: Span of a comb below which reading all of it takes less time than the calls that leave the gaps out, 20 microseconds and more.
_SIEVED_BYTES = 16 << 10

#: Pieces after each of which the interpreter's lock is offered: readers that wait for it would get it 5 ms later.
_FIRST = 32

#: Bytes a thread places before it tells of them: a fiftieth of a second of a thread that reads 3 GB/s.
_PROGRESS_BYTES = 64 << 20


class ScratchTransport:
    """``deliver`` by ``threads`` reader threads with staging buffers of ``buffer_bytes`` each.

    ``most_gap``: unwanted bytes between two wanted runs of a matrix that are read rather than skipped.  ``team``: threads that are
    ready, with as large buffers; it can be used once.
    """

    name = "scratch"

    def __init__(
        self, directory: str, device: torch.device, threads: int, buffer_bytes: int, most_gap: int, team: Team[Moved] | None = None
    ) -> None:
        self._directory, self._device, self._team = directory, device, team
        self._threads, self._buffer_bytes, self._most_gap = threads, buffer_bytes, most_gap

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        work = _Work()
        whole = threading.Lock()

        def read(staging: Staging) -> Moved:
            files = Files(self._directory, plan.catalog.files)
            return _Reader(files, sink, progress, self._device, self._buffer_bytes, self._most_gap, whole).run(work, check, staging)

        def prepare() -> None:
            with collector_paused():
                work.fill(work_of(plan, sink.direct, self._buffer_bytes, self._most_gap))

        with self._team or Team[Moved](self._device, self._threads, self._buffer_bytes) as team:
            try:
                moved = team.work(read, prepare)
            finally:  # after an error of one, or an interrupt here, the others stop at their next piece of work
                work.stop()
                sink.stop()
        return Moved(
            bytes_read=sum(m.bytes_read for m in moved),
            bytes_copied=sum(m.bytes_copied for m in moved),
            slow_path=sum(not d.passes for d in plan.deliveries),
            bytes_placed=sum(m.bytes_placed for m in moved),
        )


class _Work:
    """Pieces of work, handed out in file order to whoever asks next, while those that come later are still being prepared.

    Each reader works within its context: one that leaves it with an error ends the work of all.

    Shared by a queue whose calls are whole for an interrupt (Ctrl-C), which comes to the thread that fills it: between the steps of
    a lock of Python's it would leave that locked, and the readers waiting for ever.
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
        """Takes in everything there is to do."""
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
            self._pieces.put(None)  # for the next one that asks
            return None
        return piece

    def stop(self) -> None:
        """Nothing more is handed out."""
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
        buffer_bytes: int,
        most_gap: int,
        whole: threading.Lock,
    ) -> None:
        self._files, self._sink, self._progress = files, sink, progress
        self._device, self._buffer_bytes = device, buffer_bytes
        self._most_gap, self._whole = most_gap, whole
        self._scrap = memoryview(bytearray(max(most_gap, int(MAX_OVERREAD * buffer_bytes))))
        self._overread = self._copied = 0

    def run(self, work: _Work, check: Callable[[], None], staging: Staging) -> Moved:
        placed = told = 0
        with self._files, work:
            while (piece := work.next()) is not None:
                check()
                if isinstance(piece, Block):
                    self._block(piece, staging)
                elif isinstance(piece, Bundle):
                    self._bundle(piece, staging)
                elif piece.memory.bytes is not None:
                    self._fill(piece, _final(piece), {})
                else:
                    self._send(piece, staging)
                placed += piece.nbytes
                told = self._tell(placed, told)
            self._progress.advance(placed - told)
        return Moved(placed + self._overread, self._copied, 0, placed)

    def _tell(self, placed: int, told: int) -> int:
        """Tells of progress, but not of every piece: whoever shows it takes time and a lock."""
        if placed - told < _PROGRESS_BYTES:
            return told
        self._progress.advance(placed - told)
        return placed

    def _send(self, piece: Stretch | Comb, staging: Staging) -> None:
        """Reads into a pinned buffer and copies from there to the flat place on the device."""
        slot, nbytes = staging.take(piece.nbytes), piece.nbytes
        self._fill(piece, slot.bytes, slot.combs)
        piece.memory.tensor[piece.at : piece.at + nbytes].copy_(slot.tensor[:nbytes], non_blocking=True)
        staging.give(slot)
        self._copied += nbytes

    def _fill(self, piece: Stretch | Comb, into: memoryview, combs: dict[tuple[int, int], list[memoryview]]) -> None:
        """Reads a piece into the beginning of ``into``.  ``combs`` keeps the buffer lists of combs, which are the same for
        every comb of one shape: making one takes longer than some reads."""
        if isinstance(piece, Stretch):
            self._files.scatter(piece.tensor, piece.start, [into[: piece.nbytes]], piece.nbytes)
            return
        length, gap = piece.length, piece.stride - piece.length
        if piece.span <= min(_SIEVED_BYTES, len(self._scrap)):
            self._sieve(piece, into)
            return
        if self._files.gather(piece.tensor, piece.start, piece.stride, length, into[: piece.nbytes]):
            return
        buffers = combs.get((length, gap), [])
        if len(buffers) < 2 * piece.count:
            scrap = self._scrap[:gap]
            buffers = [b for run in range(piece.count) for b in (into[run * length : (run + 1) * length], scrap)]
            combs[length, gap] = buffers
        for run in range(0, piece.count, MAX_RUNS):
            runs = min(MAX_RUNS, piece.count - run)
            nbytes = runs * piece.stride - gap
            self._files.scatter(piece.tensor, piece.start + run * piece.stride, buffers[2 * run : 2 * (run + runs) - 1], nbytes)
            self._overread += (runs - 1) * gap

    def _sieve(self, piece: Comb, into: memoryview) -> None:
        """Reads all that a small comb spans, and keeps its runs."""
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
        # Staged as a whole where any part has to be: mixed blocks are rare and small.
        staged = block.staged
        # A tensor that has to be held whole: one at a time, which is what the plan counts.
        with self._whole if staged > self._buffer_bytes else nullcontext():
            self._place(block, staged, staging)
        self._copied += block.nbytes

    def _place(self, block: Block, staged: int, staging: Staging) -> None:
        """Reads a block into ``staged`` bytes of a staging buffer, and has it placed."""
        slot, spans = staging.take(staged), spans_of(item.nbytes for item in block.extents)
        self._read(block, [slot.bytes[at : at + nbytes] for at, nbytes in spans])
        buffer = slot.tensor[:staged]
        if self._device.type != "cpu" and len(spans) >= _ONE_TRANSFER:
            buffer = buffer.to(self._device, non_blocking=True)
        parts = list(zip(block.extents, block.places, cut(buffer, spans), strict=True))
        spread([(place, content) for _, place, content in parts if place is not None])
        others = [(item.part, as_stored(item.part, content)) for item, place, content in parts if place is None]
        if others:
            self._sink.place_all(others)
        staging.give(slot)

    def _bundle(self, bundle: Bundle, staging: Staging) -> None:
        """Reads small pieces, each to its place on the host, or one behind another into a buffer and from there to the device."""
        if all(piece.memory.bytes is not None for piece in bundle.pieces):
            for piece in bundle.pieces:
                self._fill(piece, _final(piece), {})
            return
        spans = spans_of(piece.nbytes for piece in bundle.pieces)
        staged = sum(spans[-1])
        slot = staging.take(staged)
        for piece, (at, nbytes) in zip(bundle.pieces, spans, strict=True):
            self._fill(piece, slot.bytes[at : at + nbytes], {})
        # A transfer for each, but one call for all, and no memory of the device: what lies between large tensors is seldom much.
        contents = cut(slot.tensor[:staged], spans)
        spread([(Place(piece.memory, piece.at, piece.nbytes), content) for piece, content in zip(bundle.pieces, contents, strict=True)])
        staging.give(slot)
        self._copied += bundle.nbytes

    def _read(self, block: Block, places: Sequence[memoryview]) -> None:
        """Reads extents that follow each other by one call, or the runs of one extent."""
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
        """Reads one part: in one call if it is one run; else without what lies between its runs, or a call for each group of them with
        that."""
        if len(item.runs.steps) == 1:
            (_, stride), *_ = item.runs.steps
            if self._files.gather(item.part.tensor, item.first, stride, item.runs.length, place):
                return
        offsets, length, tensor = item.runs.offsets(), item.runs.length, item.part.tensor
        for first, last in _groups(offsets, length, self._most_gap):
            buffers = [place[first * length : (first + 1) * length]]
            for run in range(first + 1, last):
                gap = offsets[run] - offsets[run - 1] - length
                if gap:
                    buffers.append(self._scrap[:gap])
                    self._overread += gap
                buffers.append(place[run * length : (run + 1) * length])
            self._files.scatter(tensor, item.start + offsets[first], buffers, offsets[last - 1] + length - offsets[first])


def _final(piece: Stretch | Comb) -> memoryview:
    """The place of a piece on the host."""
    assert piece.memory.bytes is not None
    return piece.memory.bytes[piece.at : piece.at + piece.nbytes]


def _on_host(block: Block) -> list[memoryview] | None:
    """Where all of a block's bytes belong, if they can be read right there."""
    final = []
    for item, place in zip(block.extents, block.places, strict=True):
        if place is None or place.memory.bytes is None:
            return None
        final.append(place.memory.bytes[place.at : place.at + item.nbytes])
    return final


def _groups(offsets: Sequence[int], length: int, most_gap: int) -> Iterator[tuple[int, int]]:
    """Runs that one call reads, as (first, behind the last): until a gap too wide to be read, or too many buffers."""
    first = 0
    for run in range(1, len(offsets)):
        if run - first == MAX_RUNS or not 0 <= offsets[run] - offsets[run - 1] - length <= most_gap:
            yield first, run
            first = run
    yield first, len(offsets)
