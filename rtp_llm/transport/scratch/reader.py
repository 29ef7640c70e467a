"""The own reader: threads that pread a plan's byte ranges straight into the final parameters.

On the CPU a part whose bytes stand in the file as they stand in the parameter is read right into it: no buffer, no
copy.  Everything else (another dtype, a permutation, a CUDA device) goes through one small staging buffer a thread
(pinned, and two of them, for CUDA), which bounds host memory by ``threads * buffers * buffer_bytes`` whatever the
model's size.  Only a tensor that an op cannot pass in parts is held whole, one a thread; the plan counts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType

import torch

from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.boxes import extent, view
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.ranges import byte_runs
from rtp_llm.transport.interface import Moved, Progress, Sink
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.staging import Staging


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
        return Moved(sum(m.bytes_read for m in moved), sum(m.bytes_copied for m in moved), sum(not d.passes for d in plan.deliveries))


def _finish(readers: list[Future[Moved]], work: _Work) -> None:
    """Waits for all readers; an error of one, or an interrupt here, stops the others at their next part."""
    try:
        done, _ = wait(readers, return_when=FIRST_EXCEPTION)
        for reader in done:
            reader.result()
    finally:
        work.stop()


class _Work:
    """The plan's deliveries in parts, handed out in file order to whoever asks next.

    Each reader works within its context: one that leaves it with an error ends the work of all.
    """

    def __init__(self, plan: LoadPlan, most_bytes: int) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._parts: Iterator[Delivery] = (part for delivery in plan.deliveries for part in delivery.parts(most_bytes))

    def __enter__(self) -> _Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.stop()

    def next(self) -> Delivery | None:
        with self._lock:
            return None if self._stopped else next(self._parts, None)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


class _Reader:
    """One thread's loop."""

    def __init__(self, files: Files, sink: Sink, progress: Progress, device: torch.device, buffer_bytes: int) -> None:
        self._files, self._sink, self._progress = files, sink, progress
        self._device, self._buffer_bytes = device, buffer_bytes

    def run(self, work: _Work, check: Callable[[], None]) -> Moved:
        read = copied = 0
        with work, Staging(self._device, self._buffer_bytes) as staging:
            while (part := work.next()) is not None:
                check()
                nbytes = part.nbytes
                place = self._sink.direct(part)
                if place is not None:
                    self._read(part, place)
                else:
                    with staging.buffer(nbytes) as buffer:
                        self._read(part, buffer.numpy().data)
                        self._sink.place(part, as_stored(part, buffer))
                    copied += nbytes
                read += nbytes
                self._progress.advance(nbytes)
        return Moved(read, copied, 0)

    def _read(self, part: Delivery, into: memoryview) -> None:
        tensor = part.tensor
        if tensor.strides is not None:
            self._files.read(tensor, (0,), tensor.nbytes, into)
        else:
            runs = byte_runs(tensor.shape, part.raw_box, DTYPES[tensor.dtype].bits)
            self._files.read(tensor, runs.offsets, runs.length, into)


def as_stored(part: Delivery, buffer: torch.Tensor) -> torch.Tensor:
    """A part's bytes (``uint8``, flat) as a tensor of the stored dtype with the shape of ``part.raw_box``."""
    tensor = part.tensor
    name = DTYPES[tensor.dtype].torch_name
    assert name is not None, f"{tensor.name}: the plan let {tensor.dtype} through"
    flat = buffer.view(getattr(torch, name))
    if tensor.strides is not None:
        return view(flat.as_strided(tensor.shape, tensor.strides), part.raw_box)
    return flat.view(extent(part.raw_box))
