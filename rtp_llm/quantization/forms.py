"""How the tensors of a quantised matrix follow its rows and columns.

Every format stores a matrix ``[out, in]`` as a few tensors: codes, scales, zero points, group indices.  Each of their
dimensions either stands for rows or columns of the matrix, so many to an element, or has a fixed size, as a
:class:`TensorForm` says.  From that follow the tensor's full shape, the part that a shard needs, its place in a layer's
parameter, and which shards are impossible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from rtp_llm.parallel.shard import Span
from rtp_llm.plan.boxes import Box, Shape
from rtp_llm.plan.pieces import Piece

#: Axes of a matrix.
ROWS, COLUMNS = 0, 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """``rows`` and ``columns`` of the logical matrix ``slot`` of full ``shape`` (``[out, in]``), which a layer holds.

    ``place``: which of a stack of matrices (an expert) it belongs to; None in a layer without a stack.
    """

    slot: str
    shape: tuple[int, int]
    rows: Span
    columns: Span
    place: int | None = None

    @property
    def spans(self) -> tuple[Span, Span]:
        return self.rows, self.columns


@dataclass(frozen=True, slots=True)
class Along:
    """A dimension along rows or columns: one element stands for ``per`` of them.

    ``partial``: the last element may stand for fewer.  A shard may begin or end within an element, which it then holds whole
    (a block's scale).  Else both must be multiples of ``per`` (packed codes).
    ``whole``: every rank holds all of it (scales selected by an index).
    """

    axis: int
    per: int = 1
    partial: bool = False
    whole: bool = False

    def size(self, matrix: Matrix) -> int:
        """Elements of the full tensor."""
        return -(-matrix.shape[self.axis] // self.per)

    def span(self, matrix: Matrix) -> Span:
        """Elements that the shard needs."""
        if self.whole:
            return 0, self.size(matrix)
        start, stop = matrix.spans[self.axis]
        return start // self.per, -(-stop // self.per)

    def splits(self, matrix: Matrix) -> bool:
        """Whether the tensor or the shard ends within an element that cannot be divided."""
        if self.partial:
            return False
        cuts = (matrix.shape[self.axis],) if self.whole else (matrix.shape[self.axis], *matrix.spans[self.axis])
        return any(cut % self.per for cut in cuts)

    def cuts(self, matrix: Matrix) -> list[Span]:
        """The span in parts that are equal or disjoint on any two ranks: an element shared with another rank is a part."""
        start, stop = self.span(matrix)
        if self.whole or not self.partial:
            return [(start, stop)]
        low, high = matrix.spans[self.axis]
        edges = {start, stop}
        if low % self.per:
            edges.add(start + 1)
        if high % self.per and high != matrix.shape[self.axis]:
            edges.add(stop - 1)
        ordered = sorted(edges)
        return list(zip(ordered, ordered[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Fixed:
    """A dimension of a size that does not depend on the matrix."""

    count: int

    def size(self, matrix: Matrix) -> int:
        return self.count

    def span(self, matrix: Matrix) -> Span:
        return 0, self.count

    def splits(self, matrix: Matrix) -> bool:
        return False

    def cuts(self, matrix: Matrix) -> list[Span]:
        return [(0, self.count)]


@dataclass(frozen=True, slots=True)
class TensorForm:
    """One tensor of a quantised matrix: its name after the matrix's slot, torch's name of its dtype, and its dimensions."""

    name: str
    dtype: str
    dims: tuple[Along | Fixed, ...] = ()

    def shape(self, matrix: Matrix) -> Shape:
        """The full tensor's."""
        return tuple([dim.size(matrix) for dim in self.dims])

    def along(self, axis: int) -> Along | None:
        """The dimension along rows or columns; None where there is none."""
        return next((dim for dim in self.dims if isinstance(dim, Along) and dim.axis == axis), None)


@dataclass(frozen=True, slots=True)
class Laid:
    """A parameter with one tensor of several matrices: its shape, its tiles, and the box of each matrix."""

    form: TensorForm
    shape: Shape
    tiles: tuple[Piece, ...]
    boxes: tuple[Box, ...]


def lay(form: TensorForm, matrices: Sequence[Matrix]) -> Laid:
    """Lays out one tensor of all ``matrices`` of a layer in one parameter.

    Matrices of one place are stacked along the dimension of rows; if the tensor has none, along a leading dimension.  Places
    are a further leading dimension.
    """
    stack = next((i for i, dim in enumerate(form.dims) if isinstance(dim, Along) and dim.axis == ROWS and not dim.whole), None)
    stacked = matrices[0].place is not None
    divided = any(isinstance(dim, Along) and dim.partial for dim in form.dims)
    tiles: list[Piece] = []
    boxes: list[Box] = []
    at: dict[int | None, int] = {}
    extents: dict[int | None, Shape] = {}
    for matrix in matrices:
        spans = [dim.span(matrix) for dim in form.dims]
        origin = at.get(matrix.place, 0)
        lead: Box = () if matrix.place is None else ((matrix.place, matrix.place + 1),)
        if stack is None:
            lead = (*lead, (origin, origin + 1))
            at[matrix.place] = origin + 1
        else:
            at[matrix.place] = origin + spans[stack][1] - spans[stack][0]
        begin = [origin if i == stack else 0 for i in range(len(spans))]
        box = (*lead, *[(b, b + hi - lo) for b, (lo, hi) in zip(begin, spans, strict=True)])
        boxes.append(box)
        slot, shape = f"{matrix.slot}.{form.name}", form.shape(matrix)
        if divided:
            for cut in product(*(dim.cuts(matrix) for dim in form.dims)):
                local = tuple((a - lo + b, z - lo + b) for (a, z), (lo, _), b in zip(cut, spans, begin, strict=True))
                tiles.append(Piece(slot, shape, cut, (*lead, *local)))
        else:
            tiles.append(Piece(slot, shape, tuple(spans), box))
        size = [at[matrix.place] if i == stack else hi - lo for i, (lo, hi) in enumerate(spans)]
        extents[matrix.place] = (at[matrix.place], *size) if stack is None else tuple(size)
    (extent,) = {*extents.values()}
    places = (len(extents),) if stacked else ()
    return Laid(form, (*places, *extent), tuple(tiles), tuple(boxes))


def split_units(form: TensorForm, matrix: Matrix) -> Iterator[Along]:
    """The dimensions along which the shard would cut through an element."""
    for dim in form.dims:
        if isinstance(dim, Along) and dim.splits(matrix):
            yield dim
