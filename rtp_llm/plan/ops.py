"""Ops turn a tensor of a file into the slot that it provides, and map boxes from one to the other.

A source is read by *boxes*, whole only where it must be.  ``pull``: the input box that an output box needs.  ``push``: the
output box that this input gives.  For most ops the two are inverse.  An op that cannot pass a box pulls everything; the
reader then cuts the wanted box from the result.

Every op has a ``reverse``: the exporter runs the mapping backwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from rtp_llm.plan.boxes import Box, Shape, extent, view, whole

if TYPE_CHECKING:
    import torch


class Op(Protocol):
    """``shape``: of the input, in elements, everywhere below.  Implementations are frozen dataclasses, whose ``repr``
    enters the plan's digest."""

    #: Whether elements keep their order, so that bytes may go from the file to their place as they are.
    verbatim: ClassVar[bool]
    #: Whether a box can be cut into parts that pass one by one.
    local: ClassVar[bool]

    def out_shape(self, shape: Shape) -> Shape:
        """The output's shape."""

    def pull(self, box: Box, shape: Shape) -> Box:
        """The smallest input box that the output's ``box`` needs."""

    def push(self, box: Box, shape: Shape) -> Box:
        """The output box that ``apply`` makes from the input's ``box`` (one that ``pull`` gave)."""

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        """From a pulled input box to its output, without a copy where that is possible."""

    def reverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """From an output box back to the input box, bit for bit."""


@dataclass(frozen=True, slots=True)
class Select:
    """Row ``index`` of the first dimension, which disappears: one expert of ``[E, ...]``."""

    index: int

    verbatim: ClassVar[bool] = True
    local: ClassVar[bool] = True

    def out_shape(self, shape: Shape) -> Shape:
        return shape[1:]

    def pull(self, box: Box, shape: Shape) -> Box:
        return ((self.index, self.index + 1), *box)

    def push(self, box: Box, shape: Shape) -> Box:
        return box[1:]

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0]

    def reverse(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[None]


@dataclass(frozen=True, slots=True)
class Cut:
    """``count`` elements from ``start`` of dimension ``dim``: gate or up of a tensor that holds both one above the other."""

    start: int
    count: int
    dim: int = 0

    verbatim: ClassVar[bool] = True
    local: ClassVar[bool] = True

    def out_shape(self, shape: Shape) -> Shape:
        return (*shape[: self.dim], self.count, *shape[self.dim + 1 :])

    def pull(self, box: Box, shape: Shape) -> Box:
        return self._moved(box, self.start)

    def push(self, box: Box, shape: Shape) -> Box:
        return self._moved(box, -self.start)

    def _moved(self, box: Box, by: int) -> Box:
        a, b = box[self.dim]
        return (*box[: self.dim], (a + by, b + by), *box[self.dim + 1 :])

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reverse(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class Transpose:
    """The last two dimensions change places."""

    verbatim: ClassVar[bool] = False
    local: ClassVar[bool] = True

    def out_shape(self, shape: Shape) -> Shape:
        return (*shape[:-2], shape[-1], shape[-2])

    def pull(self, box: Box, shape: Shape) -> Box:
        return (*box[:-2], box[-1], box[-2])

    def push(self, box: Box, shape: Shape) -> Box:
        return (*box[:-2], box[-1], box[-2])

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2)

    def reverse(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-1, -2)


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Reorders the rows of each of ``heads`` heads from neighbouring pairs (GPT-J, Meta's Llama files) to halves (Hugging Face).
    Output row ``j`` of a head is input row ``2j`` in the first half and ``2(j - d/2) + 1`` in the second.

    The permutation scatters a box over the whole head: everything is pulled.
    """

    heads: int

    verbatim: ClassVar[bool] = False
    local: ClassVar[bool] = False

    def out_shape(self, shape: Shape) -> Shape:
        return shape

    def pull(self, box: Box, shape: Shape) -> Box:
        return whole(shape)

    def push(self, box: Box, shape: Shape) -> Box:
        return whole(shape)

    def apply(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, rest = tensor.shape[0], tensor.shape[1:]
        return tensor.reshape(self.heads, rows // self.heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)

    def reverse(self, tensor: torch.Tensor) -> torch.Tensor:
        rows, rest = tensor.shape[0], tensor.shape[1:]
        return tensor.reshape(self.heads, 2, rows // self.heads // 2, *rest).transpose(1, 2).reshape(rows, *rest)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a slot comes from: tensor ``raw`` of shape ``shape``, through ``ops`` in the order of application."""

    raw: str
    shape: Shape
    ops: tuple[Op, ...] = ()

    @property
    def slot_shape(self) -> Shape:
        """The slot's shape."""
        shape = self.shape
        for op in self.ops:
            shape = op.out_shape(shape)
        return shape

    def _shapes(self) -> list[Shape]:
        """The input shape of each op."""
        shapes, shape = [], self.shape
        for op in self.ops:
            shapes.append(shape)
            shape = op.out_shape(shape)
        return shapes

    def pull(self, slot_box: Box) -> Box:
        """The box of the raw tensor to read for ``slot_box``."""
        if not self.ops:
            return slot_box
        box = slot_box
        for op, shape in zip(reversed(self.ops), reversed(self._shapes()), strict=True):
            box = op.pull(box, shape)
        return box

    def push(self, raw_box: Box) -> Box:
        """The slot box that a pulled raw box gives; larger than the wanted one where an op cannot pass a box."""
        box = raw_box
        for op, shape in zip(self.ops, self._shapes(), strict=True):
            box = op.push(box, shape)
        return box

    def passes(self, slot_box: Box) -> bool:
        """Whether just the bytes of ``slot_box`` are read for it."""
        return not self.ops or self.push(self.pull(slot_box)) == slot_box

    def apply(self, read: torch.Tensor, slot_box: Box) -> torch.Tensor:
        """The content of ``slot_box``, from ``read``, the content of ``pull(slot_box)``."""
        tensor = read
        for op in self.ops:
            tensor = op.apply(tensor)
        if tuple(tensor.shape) == extent(slot_box):
            return tensor
        got = self.push(self.pull(slot_box))
        return view(tensor, tuple((a - o, b - o) for (a, b), (o, _) in zip(slot_box, got, strict=True)))

    def reverse(self, slot: torch.Tensor) -> torch.Tensor:
        """The content of ``pull(whole slot)`` from the whole slot."""
        tensor = slot
        for op in reversed(self.ops):
            tensor = op.reverse(tensor)
        return tensor
