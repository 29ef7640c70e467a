"""Boxes: the part of a tensor between ``start`` (inclusive) and ``stop`` (exclusive) in every dimension."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

Shape: TypeAlias = tuple[int, ...]
#: One ``(start, stop)`` pair a dimension; the box of a scalar is ``()``.
Box: TypeAlias = tuple[tuple[int, int], ...]


def whole(shape: Shape) -> Box:
    """The box that covers a tensor of ``shape``."""
    return tuple([(0, n) for n in shape])


def extent(box: Box) -> Shape:
    """The shape of what a box holds."""
    return tuple([b - a for a, b in box])


def volume(box: Box) -> int:
    """The number of elements in a box (1 for a scalar)."""
    return prod([b - a for a, b in box])


def inside(box: Box, shape: Shape) -> bool:
    """Whether a box lies within a tensor of ``shape``."""
    if len(box) != len(shape):
        return False
    for (a, b), n in zip(box, shape, strict=True):
        if not 0 <= a <= b <= n:
            return False
    return True


def shift(box: Box, origin: Shape) -> Box:
    """The box moved by ``origin``, one offset a dimension."""
    return tuple((a + o, b + o) for (a, b), o in zip(box, origin, strict=True))


def view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of ``tensor`` that ``box`` names, sharing its storage."""
    return tensor[tuple(slice(a, b) for a, b in box)]
