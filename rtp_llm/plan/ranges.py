"""The byte runs of a box in a row-major tensor, and how a box is cut into parts that fit a buffer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from rtp_llm.plan.boxes import Box, Shape, extent, volume


@dataclass(frozen=True, slots=True)
class Runs:
    """A box of a contiguous tensor as equal runs of ``length`` bytes.

    The first run begins ``first`` bytes behind the tensor's first byte; ``steps`` are the dimensions that repeat it,
    outermost first, as (how often, bytes apart).  In that order the runs, laid end to end, are the box in row-major order.
    """

    first: int
    length: int
    steps: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many runs there are."""
        return prod([times for times, _ in self.steps]) if self.steps else 1

    @property
    def nbytes(self) -> int:
        return self.count * self.length if self.steps else self.length

    @property
    def stop(self) -> int:
        """The offset behind the last byte of the last run."""
        last = sum([(times - 1) * apart for times, apart in self.steps]) if self.steps else 0
        return self.first + last + self.length

    def offsets(self) -> list[int]:
        """The offset of each run."""
        offsets = [self.first]
        for times, apart in self.steps:
            offsets = [offset + apart * index for offset in offsets for index in range(times)]
        return offsets


def byte_runs(shape: Shape, box: Box, bits: int) -> Runs:
    """The runs of ``box`` in a contiguous tensor of ``shape`` with ``bits`` for each element; one empty run for an empty box.

    Elements smaller than a byte must begin and end on whole bytes in the last dimension, else ``ValueError``.
    """
    inner = len(shape)  # dimensions from here on are covered whole, so they are part of one run
    while inner > 0 and box[inner - 1] == (0, shape[inner - 1]):
        inner -= 1
    below = prod(shape[inner:])  # elements in one index of dimension inner - 1
    if inner == 0:
        return Runs(0, _bytes(below, bits))
    if volume(box) == 0:
        return Runs(0, 0)
    first, last = box[inner - 1]
    length, offset = _bytes((last - first) * below, bits), _bytes(first * below, bits)
    steps: list[tuple[int, int]] = []
    apart = shape[inner - 1] * below
    for dimension in range(inner - 2, -1, -1):
        start, stop = box[dimension]
        offset += start * _bytes(apart, bits)
        if stop - start > 1:
            steps.append((stop - start, _bytes(apart, bits)))
        apart *= shape[dimension]
    return Runs(offset, length, tuple(reversed(steps)))


def _bytes(elements: int, bits: int) -> int:
    size, rest = divmod(elements * bits, 8)
    if rest:
        raise ValueError(f"{elements} elements of {bits} bits do not end on a byte")
    return size


def parts(box: Box, most: int) -> Iterator[Box]:
    """Cuts ``box`` along its leading dimensions into boxes of at most ``most`` elements (at least one element each),
    in row-major order."""
    if volume(box) <= most or not box:
        yield box
        return
    shape = extent(box)
    rest = prod(shape[1:])
    (start, stop), tail = box[0], box[1:]
    if rest <= most:
        rows = max(1, most // max(1, rest))
        for a in range(start, stop, rows):
            yield ((a, min(a + rows, stop)), *tail)
    else:
        for a in range(start, stop):
            for sub in parts(tail, most):
                yield ((a, a + 1), *sub)
