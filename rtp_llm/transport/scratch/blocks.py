"""Cuts a plan's deliveries, in file order, into pieces of work that fit a staging buffer.

Bytes are read by vectored calls (``preadv``), which scatter wanted bytes to their places and the bytes between them to a
scrap buffer.  So small neighbours share one call, and the columns of a row-parallel matrix take one call for hundreds of rows.

This thread does the arithmetic: readers share one interpreter lock, which at 45 GB/s has 180 microseconds for each 8 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.errors import TransportError, internal
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.ranges import Runs, byte_runs
from rtp_llm.transport.faults import TransportFault
from rtp_llm.transport.interface import Memory, Place

#: Gaps between tensors are read over if they add at most this share of the wanted bytes: a rank reads no more of other
#: ranks' experts.
MAX_OVERREAD = 0.02
#: Linux takes at most 1,024 buffers in one call (UIO_MAXIOV); between two wanted ones lies a scrap buffer.
MAX_RUNS = 512
#: Parts begin at multiples of this in a staging buffer, so that they can be viewed in any dtype.
ALIGNMENT = 64
#: A piece below this part of a buffer is small: a call and a transfer of its own would cost more than its bytes.
_SMALL = 8
#: Small pieces that share a buffer, at most: with more, one reader would read the last ones alone.
MAX_BATCH = 32


@dataclass(frozen=True, slots=True)
class ContiguousRead:
    """``nbytes`` of a file from byte ``start``, for ``memory[at : at + nbytes]``."""

    tensor: TensorInfo
    start: int
    memory: Memory
    at: int
    nbytes: int

    @property
    def file(self) -> str:
        return self.tensor.file


@dataclass(frozen=True, slots=True)
class StridedRead:
    """``count`` runs of ``length`` bytes, ``stride`` apart, from byte ``start``; end to end in ``memory[at : at + nbytes]``."""

    tensor: TensorInfo
    start: int
    length: int
    stride: int
    count: int
    memory: Memory
    at: int

    @property
    def file(self) -> str:
        return self.tensor.file

    @property
    def nbytes(self) -> int:
        return self.length * self.count

    @property
    def span(self) -> int:
        """Bytes of the file from its first to its last."""
        return (self.count - 1) * self.stride + self.length


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """Small pieces of one file, too far apart for one call (an expert's scales, between its weights).  They share a staging
    buffer and the call that copies them to a device."""

    pieces: tuple[ContiguousRead | StridedRead, ...]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


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
        return self.start + self.runs.first

    @property
    def stop(self) -> int:
        """The file offset behind the last byte."""
        return self.start + self.runs.stop

    @property
    def staged(self) -> int:
        """Bytes of a staging buffer that it takes."""
        return _aligned(self.nbytes)


@dataclass(frozen=True, slots=True)
class Block:
    """Extents of one file, in order, read together (several only if each is one run).  ``places``: None for one that is
    converted on the way."""

    extents: tuple[Extent, ...]
    places: tuple[Place | None, ...]

    @property
    def file(self) -> str:
        return self.extents[0].part.tensor.file

    @property
    def nbytes(self) -> int:
        """Wanted bytes."""
        return sum(e.nbytes for e in self.extents)

    @property
    def staged(self) -> int:
        return sum(e.staged for e in self.extents)


Piece: TypeAlias = ContiguousRead | StridedRead | Block
Work: TypeAlias = Piece | ReadBatch


def spans_of(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Where parts of these sizes lie in a staging buffer: (first byte, bytes)."""
    spans, at = [], 0
    for nbytes in sizes:
        spans.append((at, nbytes))
        at += _aligned(nbytes)
    return spans


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def extent_of(part: Delivery) -> Extent:
    """Where a part's bytes lie; a tensor whose elements are not row-major in the file is one run."""
    tensor = part.tensor
    if tensor.strides is not None:
        return Extent(part, tensor.start, Runs(0, tensor.nbytes))
    return Extent(part, tensor.start, byte_runs(tensor.shape, part.raw_box, DTYPES[tensor.dtype].bits))


def work_of(plan: LoadPlan, direct: Callable[[Delivery], Place | None], most_bytes: int, most_gap: int) -> Iterator[Work]:
    """A plan's deliveries as work of at most ``most_bytes`` of staging each; an indivisible delivery may need more.

    In file order, except that small pieces wait for a batch.  ``direct`` is the sink's: deliveries with a flat place become
    contiguous and strided reads; those without, and small neighbours, become blocks.  Gaps between the rows of a matrix of up to
    ``most_gap`` bytes are read over.
    """
    room = max(ALIGNMENT, most_bytes // ALIGNMENT * ALIGNMENT)
    small: list[ContiguousRead | StridedRead] = []
    staged = 0
    for piece in _pieces(plan, direct, room, most_gap):
        joins = not isinstance(piece, Block) and piece.nbytes < room // _SMALL
        other_file = bool(small) and piece.file != small[0].file
        full = joins and (len(small) == MAX_BATCH or staged + _aligned(piece.nbytes) > room)
        if small and (other_file or full):
            yield _batch(small)
            small, staged = [], 0
        if isinstance(piece, Block) or not joins:
            yield piece
        else:
            small.append(piece)
            staged += _aligned(piece.nbytes)
    if small:
        yield _batch(small)


def _batch(small: list[ContiguousRead | StridedRead]) -> ContiguousRead | StridedRead | ReadBatch:
    return small[0] if len(small) == 1 else ReadBatch(tuple(small))


def _pieces(plan: LoadPlan, direct: Callable[[Delivery], Place | None], room: int, most_gap: int) -> Iterator[Piece]:
    """A plan's deliveries, each alone or with its neighbours, in file order."""
    pending: list[tuple[Extent, Place | None]] = []
    staged = wanted = 0
    for delivery in plan.deliveries:
        extent, place = extent_of(delivery), direct(delivery)
        if not extent.runs.length:
            continue  # the box of a rank whose share is empty, or an empty tensor: nothing to read or to write
        if place is not None and place.nbytes != extent.nbytes:
            what = "its bytes and their place have different sizes"
            raise TransportError(internal(TransportFault.INTERNAL, what, tensor=delivery.slot, expected=place.nbytes, actual=extent.nbytes))
        stream = [] if place is None else _streamed(extent, place, room, most_gap)
        if stream:
            if pending:
                yield _block(pending)
                pending, staged, wanted = [], 0, 0
            yield from stream
            continue
        whole = [(extent, place)] if extent.nbytes <= room else [(extent_of(part), direct(part)) for part in delivery.parts(room)]
        for item, where in whole:
            if pending and not (staged + item.staged <= room and _joins(pending, wanted, item)):
                yield _block(pending)
                pending, staged, wanted = [], 0, 0
            pending.append((item, where))
            staged += item.staged
            wanted += item.nbytes
    if pending:
        yield _block(pending)


def _block(pending: list[tuple[Extent, Place | None]]) -> ContiguousRead | Block:
    """The work for pending extents; a single run with a flat place is a contiguous read."""
    (extent, place), *more = pending
    if place is not None and not more and not extent.runs.steps:
        return ContiguousRead(extent.part.tensor, extent.first, place.memory, place.at, extent.nbytes)
    return Block(tuple(e for e, _ in pending), tuple(p for _, p in pending))


def _joins(pending: list[tuple[Extent, Place | None]], wanted: int, extent: Extent) -> bool:
    """Whether the call that reads the pending extents, ``wanted`` bytes, can also read this one."""
    first, last = pending[0][0], pending[-1][0]
    wanted += extent.nbytes
    return (
        len(pending) < MAX_RUNS
        and last.part.tensor.file == extent.part.tensor.file
        and extent.first >= last.stop
        and extent.stop - first.first - wanted <= MAX_OVERREAD * wanted
        and not last.runs.steps
        and not extent.runs.steps
        and last.part.divisible
        and extent.part.divisible
    )


def _streamed(extent: Extent, place: Place, most_bytes: int, most_gap: int) -> list[ContiguousRead | StridedRead]:
    """A delivery with a flat place as contiguous or strided reads of at most ``most_bytes``; empty if it belongs into a block:
    small, or with runs that are unevenly spaced or too far apart."""
    tensor, length, steps = extent.part.tensor, extent.runs.length, extent.runs.steps
    if not steps:
        if extent.nbytes < most_bytes // _SMALL:
            return []
        return [
            ContiguousRead(tensor, extent.first + at, place.memory, place.at + at, min(most_bytes, extent.nbytes - at))
            for at in range(0, extent.nbytes, most_bytes)
        ]
    (count, stride), *outer = steps
    if outer or length > most_bytes or not 0 <= stride - length <= most_gap:
        return []
    rows = min(most_bytes // length, count)
    return [
        StridedRead(tensor, extent.first + row * stride, length, stride, min(rows, count - row), place.memory, place.at + row * length)
        for row in range(0, count, rows)
    ]
