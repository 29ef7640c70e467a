"""What every transport is, and what it hands bytes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from rtp_llm.plan.plan import Delivery, LoadPlan


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """All of a parameter's memory, flat: a ``uint8`` tensor and, on the host, the same as ``bytes`` to read into."""

    tensor: torch.Tensor
    bytes: memoryview | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Memory:
        """The memory of a contiguous tensor."""
        flat = parameter.reshape(-1).view(torch.uint8)
        return cls(flat, flat.numpy().data if flat.device.type == "cpu" else None)


@dataclass(frozen=True, slots=True)
class Place:
    """``memory[at : at + nbytes]``.  Numbers, not a tensor: cutting a tensor out of another one takes a reader, and all that wait
    for the interpreter's lock, longer than a small tensor is on the link."""

    memory: Memory
    at: int
    nbytes: int


class Sink(Protocol):
    """Where bytes go.  Called from several threads, for disjoint places; it alone says where parameters are written."""

    def direct(self, part: Delivery) -> Place | None:
        """Where the bytes of ``part`` belong end to end as they stand in the file; None where they have to go through :meth:`place`.

        Whoever takes it writes all of it."""

    def place(self, part: Delivery, content: torch.Tensor) -> None:
        """Puts ``content``, the raw tensor's ``part.raw_box`` in its stored dtype, into all of the part's targets.

        ``content`` is valid only until the work queued on the current stream is done (on the CPU: during the call).
        """

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        """:meth:`place` for several parts at once; contents may lie on the device already.

        Parts of a tensor that is gathered first may have to wait for room, until those before them in the plan have been placed.
        """

    def stop(self) -> None:
        """Nothing more will come, because of an error: whoever waits within the sink leaves it with an exception."""


class Progress(Protocol):
    """Shown while bytes move; ``advance`` is called from several threads."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def stop(self) -> None: ...


class Quiet:
    """No progress."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Moved:
    """What a transport did: bytes read from storage, bytes copied once more on the host or the device before they were
    in place, weights that took a slow path (each transport says which that is), and bytes of the plan that were placed,
    which must be ``plan.bytes_read``: a transport that reads more than the plan asks for, or reads for other ranks too,
    still places just the plan."""

    bytes_read: int
    bytes_copied: int
    slow_path: int
    bytes_placed: int


class Transport(Protocol):
    """Moves what a plan says, and decides nothing about it."""

    @property
    def name(self) -> str:
        """As it stands in reports: ``scratch``, ``fastsafetensors``."""

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        """Hands every delivery of ``plan``, whole or in parts, to ``sink`` exactly once.

        ``check`` is called between parts and raises what ends the load (another rank's error).

        Raises:
            TransportError: I/O errors, and files that are not what the catalogue saw.
        """
