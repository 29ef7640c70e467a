"""The interfaces of a transport and of the sink that takes its bytes."""

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
    """``memory[at : at + nbytes]``.  Numbers, not a tensor: slicing a tensor holds the interpreter's lock for longer than a small
    tensor takes on the link."""

    memory: Memory
    at: int
    nbytes: int


class Sink(Protocol):
    """Takes bytes and writes parameters; nothing else decides where.  Called from several threads, for disjoint places."""

    def direct(self, part: Delivery) -> Place | None:
        """The place that takes the bytes of ``part`` as they stand in the file, end to end; None where :meth:`place` must convert.

        The caller writes all of it."""

    def place(self, part: Delivery, content: torch.Tensor) -> None:
        """Writes ``content``, the raw tensor's ``part.raw_box`` in its stored dtype, to all of the part's targets.

        ``content`` is valid only until the work queued on the current stream is done (on the CPU: during the call).
        """

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        """:meth:`place` for several parts at once; contents may lie on the device already.

        Blocks while a derived tensor has no room, until parts before it in the plan are placed.
        """

    def stop(self) -> None:
        """An error ended the transfer: threads that wait in the sink raise."""


class Progress(Protocol):
    """Shown while bytes move; ``advance`` is called from several threads."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def stop(self) -> None: ...


class NoProgress:
    """No progress."""

    def start(self, total_bytes: int) -> None: ...

    def advance(self, nbytes: int) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What a transport did, in bytes.  ``bytes_read``: from storage, other ranks' and gaps included.  ``bytes_copied``: copied
    once more on the host or the device.  ``slow_path``: number of weights that took the transport's slow path.
    ``bytes_placed``: of the plan; must be ``plan.bytes_read``."""

    bytes_read: int
    bytes_copied: int
    slow_path: int
    bytes_placed: int


class Transport(Protocol):
    """Carries out a plan, and decides nothing about it."""

    @property
    def name(self) -> str:
        """As it stands in reports: ``scratch``, ``fastsafetensors``."""

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> TransferStats:
        """Delivers everything in ``plan``, whole or in parts, to ``sink`` exactly once.

        ``check`` is called between parts and raises another rank's error.

        Raises:
            TransportError: I/O errors, and files that are not what the catalogue saw.
        """
