"""Parameters that are not in the checkpoint as such, but made of a tensor that is, while it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rtp_llm.plan.boxes import Box, Shape

if TYPE_CHECKING:
    import torch


class Maker(Protocol):
    """What is made of a slot, as named outputs.  Implementations are frozen dataclasses, whose ``repr`` enters the digest."""

    def needs(self, output: str, box: Box, shape: Shape) -> Box:
        """The box of the slot, whose full shape is ``shape``, that ``box`` of ``output`` is made of."""

    def working_bytes(self, region: Box) -> int:
        """What :meth:`make` takes at most beside the content of ``region``, its outputs included."""

    def make(self, content: torch.Tensor, region: Box) -> Mapping[str, tuple[torch.Tensor, Box]]:
        """All outputs that ``content``, the slot's box ``region`` in its stored dtype, gives: each with its own box."""


@dataclass(frozen=True, slots=True)
class Made:
    """``parameter[local_box]`` is ``output[box]`` of what ``maker`` makes of ``slot``, whose full shape is ``slot_shape``."""

    slot: str
    slot_shape: Shape
    maker: Maker
    output: str
    box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class Product:
    """A place in a parameter, and what of the stage's outputs belongs there."""

    param: str
    local_box: Box
    output: str
    box: Box


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a slot that is gathered whole, on the device and in its stored dtype, before parameters are made of it.

    ``name`` stands as the target of its delivery, in place of a parameter's.
    """

    name: str
    maker: Maker
    region: Box
    products: tuple[Product, ...]
