"""Host buffers of one reader thread: plain memory for the CPU, a pinned pair with a stream of its own for CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

#: Pinned buffers a thread: one is read into while the other one's copy is on its way.
CUDA_BUFFERS = 2


def staging_bytes(device_type: str, threads: int, buffer_bytes: int) -> int:
    """What all threads' buffers take on the host, and at most on the device for parts that are cast there."""
    return threads * buffer_bytes * (CUDA_BUFFERS if device_type == "cuda" else 1)


class Staging:
    """Hands out buffers; within the context of one, its content may be placed on the current stream."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._device, self._buffer_bytes = device, buffer_bytes
        self._cuda = device.type == "cuda"
        # Allocated on first use: a load that goes straight into parameters needs none.
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[torch.Tensor]:
        """A flat ``uint8`` buffer of ``nbytes`` whose earlier content has left it."""
        if nbytes > self._buffer_bytes:
            # A tensor that is read whole: a buffer of its own, gone as soon as it is placed.
            yield from self._placed(torch.empty(nbytes, dtype=torch.uint8), None)
            return
        slots = CUDA_BUFFERS if self._cuda else 1
        if len(self._buffers) < slots:
            self._buffers.append(torch.empty(self._buffer_bytes, dtype=torch.uint8, pin_memory=self._cuda))
            if self._cuda:
                self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        turn = self._turn % len(self._buffers)
        self._turn += 1
        event = self._events[turn] if self._cuda else None
        if event is not None:
            event.synchronize()
        yield from self._placed(self._buffers[turn][:nbytes], event)

    def _placed(self, buffer: torch.Tensor, event: torch.cuda.Event | None) -> Iterator[torch.Tensor]:
        if self._stream is None:
            yield buffer
            return
        with torch.cuda.stream(self._stream):
            yield buffer
            if event is not None:
                event.record(self._stream)
            else:
                self._stream.synchronize()
