"""What is read together: a plan's parts in file order, gathered into spans of one file.

A span is read by one vectored call (``preadv``), which scatters wanted bytes to their places and the bytes between them
to a scrap buffer.  So small neighbours cost one call together, and the columns of a row-parallel matrix cost one call
for hundreds of rows instead of one for each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.ranges import Runs, byte_runs

#: Unwanted bytes that are read rather than skipped.  The kernel's default read-ahead window is 128 KiB, so a gap of that
#: size is fetched from storage anyway; in the page cache, reading past it costs less than a second call.
MAX_GAP = 128 * 1024
#: Linux takes at most 1,024 buffers in one call (UIO_MAXIOV); between two wanted ones lies a scrap buffer.
MAX_BUFFERS = 1024
MAX_RUNS = MAX_BUFFERS // 2
#: Parts begin at multiples of this in a staging buffer, so that they can be viewed in any dtype.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Extent:
    """A part and where it lies in its file: ``runs`` count from byte ``start`` of the file."""

    part: Delivery
    start: int
    runs: Runs

    @property
    def nbytes(self) -> int:
        return self.runs.nbytes

    @property
    def first(self) -> int:
        """The file offset of the first byte."""
        return self.start + self.runs.offsets[0]

    @property
    def stop(self) -> int:
        """The file offset behind the last byte."""
        return self.start + self.runs.offsets[-1] + self.runs.length

    @property
    def staged(self) -> int:
        """Bytes of a staging buffer that it takes."""
        return -(-self.nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Block:
    """Extents of one file, in order, that are read together; several only if each is one run."""

    file: str
    extents: tuple[Extent, ...]

    @property
    def nbytes(self) -> int:
        """Wanted bytes."""
        return sum(e.nbytes for e in self.extents)

    @property
    def staged(self) -> int:
        return sum(e.staged for e in self.extents)

    @property
    def divisible(self) -> bool:
        return all(e.part.divisible for e in self.extents)


def extent_of(part: Delivery) -> Extent:
    """Where a part's bytes lie; a tensor whose elements are not row-major in the file is one run."""
    tensor = part.tensor
    if tensor.strides is not None:
        return Extent(part, tensor.start, Runs((0,), tensor.nbytes))
    return Extent(part, tensor.start, byte_runs(tensor.shape, part.raw_box, DTYPES[tensor.dtype].bits))


def blocks(plan: LoadPlan, most_bytes: int) -> Iterator[Block]:
    """A plan's deliveries as blocks that need at most ``most_bytes`` of staging (a delivery that cannot be divided may
    need more), in file order."""
    pending: list[Extent] = []
    staged = 0
    for delivery in plan.deliveries:
        for part in delivery.parts(most_bytes):
            extent = extent_of(part)
            if not extent.nbytes:
                continue  # the box of a rank whose share is empty, or an empty tensor: nothing to read or to write
            if pending and not (staged + extent.staged <= most_bytes and _joins(pending, extent)):
                yield Block(pending[0].part.tensor.file, tuple(pending))
                pending, staged = [], 0
            pending.append(extent)
            staged += extent.staged
    if pending:
        yield Block(pending[0].part.tensor.file, tuple(pending))


def _joins(pending: list[Extent], extent: Extent) -> bool:
    """Whether an extent can be read by the same call as those before it."""
    last = pending[-1]
    return (
        len(pending) < MAX_RUNS
        and last.part.tensor.file == extent.part.tensor.file
        and 0 <= extent.first - last.stop <= MAX_GAP
        and len(last.runs.offsets) == len(extent.runs.offsets) == 1
        and last.part.divisible
        and extent.part.divisible
    )
