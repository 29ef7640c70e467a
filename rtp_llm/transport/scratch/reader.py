"""The own reader: threads that pread a plan's byte ranges straight into the final parameters.

On the CPU a part whose bytes stand in the file as they stand in the parameter is read right into it: no buffer, no
copy.  Everything else (another dtype, a permutation, a CUDA device) goes through one small staging buffer a thread
(pinned, and two of them, for CUDA), which bounds host memory by ``threads * buffers * buffer_bytes`` whatever the
model's size.  Only a tensor that an op cannot pass in parts is held whole, one a thread; the plan counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType

import torch

from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.boxes import extent, view
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.interface import Moved, Progress, Sink
from rtp_llm.transport.scratch.blocks import MAX_GAP, MAX_RUNS, Block, Extent, blocks
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.staging import Staging

#: From this many parts on, a block goes to the device in one transfer and is spread there: a transfer for each part
#: costs about 10 microseconds of a thread's time, as much as 400 KB on the link.
_ONE_TRANSFER = 4


class ScratchTransport:
    """``deliver`` by ``threads`` reader threads with staging buffers of ``buffer_bytes`` each."""

    name = "scratch"

    def __init__(self, directory: str, device: torch.device, threads: int, buffer_bytes: int) -> None:
        self._directory, self._device = directory, device
        self._threads, self._buffer_bytes = threads, buffer_bytes

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        work = _Work(plan, self._buffer_bytes)
        with Files(self._directory, plan.files) as files, ThreadPoolExecutor(self._threads, "rtp_llm-read") as pool:
            readers = [
                pool.submit(_Reader(files, sink, progress, self._device, self._buffer_bytes).run, work, check) for _ in range(self._threads)
            ]
            _finish(readers, work)
        moved = [reader.result() for reader in readers]
        return Moved(
            bytes_read=sum(m.bytes_read for m in moved),
            bytes_copied=sum(m.bytes_copied for m in moved),
            slow_path=sum(not d.passes for d in plan.deliveries),
            bytes_placed=sum(m.bytes_placed for m in moved),
        )


def _finish(readers: list[Future[Moved]], work: _Work) -> None:
    """Waits for all readers; an error of one, or an interrupt here, stops the others at their next block."""
    try:
        done, _ = wait(readers, return_when=FIRST_EXCEPTION)
        for reader in done:
            reader.result()
    finally:
        work.stop()


class _Work:
    """The plan's blocks, handed out in file order to whoever asks next.

    Each reader works within its context: one that leaves it with an error ends the work of all.
    """

    def __init__(self, plan: LoadPlan, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._blocks: Iterator[Block] = blocks(plan, most_bytes)

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.stop()

    def next(self) -> Block | None:
        with self._lock:
            return None if self._stopped else next(self._blocks, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


class _Reader:
    """One thread's loop."""

    def __init__(self, files: Files, sink: Sink, progress: Progress, device: torch.device, buffer_bytes: int) -> None:
        self._files, self._sink, self._progress = files, sink, progress
        self._device, self._buffer_bytes = device, buffer_bytes
        self._scrap = memoryview(bytearray(MAX_GAP))
        self._overread = 0

    def run(self, work: _Work, check: Callable[[], None]) -> Moved:
        placed = copied = 0
        with work, Staging(self._device, self._buffer_bytes) as staging:
            while (block := work.next()) is not None:
                check()
                direct = [self._sink.direct(e.part) for e in block.extents]
                # Staged as a whole where any part has to be: mixed blocks are rare and small.
                places = [place for place in direct if place is not None]
                if len(places) == len(direct):
                    self._read(block, places)
                else:
                    with staging.buffer(block.staged) as buffer:
                        self._stage(block, buffer)
                    copied += block.nbytes
                placed += block.nbytes
                self._progress.advance(block.nbytes)
        return Moved(placed + self._overread, copied, 0, placed)

    def _stage(self, block: Block, buffer: torch.Tensor) -> None:
        """Reads a block into a staging buffer, and from there has it placed."""
        spans, at = [], 0
        for item in block.extents:
            spans.append((at, at + item.nbytes))
            at += item.staged
        host = buffer.numpy().data
        self._read(block, [host[a:b] for a, b in spans])
        if self._device.type != "cpu" and len(spans) >= _ONE_TRANSFER:
            buffer = buffer[:at].to(self._device, non_blocking=True)
        self._sink.place_all([(e.part, as_stored(e.part, buffer[a:b])) for e, (a, b) in zip(block.extents, spans, strict=True)])

    def _read(self, block: Block, places: Sequence[memoryview]) -> None:
        if len(block.extents) == 1:
            self._read_runs(block.extents[0], places[0])
            return
        buffers: list[memoryview] = []
        at = block.extents[0].first
        for item, place in zip(block.extents, places, strict=True):
            if item.first > at:
                buffers.append(self._scrap[: item.first - at])
                self._overread += item.first - at
            buffers.append(place)
            at = item.stop
        self._files.scatter(block.extents[0].part.tensor, block.extents[0].first, buffers)

    def _read_runs(self, item: Extent, place: memoryview) -> None:
        """Reads one part: in one call if it is one run, else a call for each group of runs with what lies between."""
        offsets, length, tensor = item.runs.offsets, item.runs.length, item.part.tensor
        for first, last in _groups(offsets, length):
            buffers = [place[first * length : (first + 1) * length]]
            for run in range(first + 1, last):
                gap = offsets[run] - offsets[run - 1] - length
                if gap:
                    buffers.append(self._scrap[:gap])
                    self._overread += gap
                buffers.append(place[run * length : (run + 1) * length])
            self._files.scatter(tensor, item.start + offsets[first], buffers)


def _groups(offsets: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    """Runs that one call reads, as (first, behind the last): until a gap too wide to be read, or too many buffers."""
    first = 0
    for run in range(1, len(offsets)):
        if run - first == MAX_RUNS or not 0 <= offsets[run] - offsets[run - 1] - length <= MAX_GAP:
            yield first, run
            first = run
    yield first, len(offsets)


def as_stored(part: Delivery, content: torch.Tensor) -> torch.Tensor:
    """A part's bytes (``uint8``, flat) as a tensor of the stored dtype with the shape of ``part.raw_box``."""
    tensor = part.tensor
    name = DTYPES[tensor.dtype].torch_name
    assert name is not None, f"{tensor.name}: the plan let {tensor.dtype} through"
    flat = content.view(getattr(torch, name))
    if tensor.strides is not None:
        return view(flat.as_strided(tensor.shape, tensor.strides), part.raw_box)
    return flat.view(extent(part.raw_box))
