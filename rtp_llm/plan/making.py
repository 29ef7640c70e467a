"""Parameters that are not in the checkpoint as such, but made of a tensor that is, while it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rtp_llm.plan.boxes import Box, Shape

if TYPE_CHECKING:
    import torch


#: A place of what is made: the output's name, the box of it that belongs there, and the memory, of that box's shape.
Place = tuple[str, Box, "torch.Tensor"]


class Maker(Protocol):
    """What is made of a slot, as named outputs.  Implementations are frozen dataclasses.

    ``step_bytes``: what working memory may be spent on at a time; more where a row alone takes more.
    """

    def needs(self, output: str, box: Box, shape: Shape) -> Box:
        """The box of the slot, whose full shape is ``shape``, that ``box`` of ``output`` is made of."""

    def working_bytes(self, region: Box, step_bytes: int) -> int:
        """What :meth:`make` takes at most beside the content of ``region`` and the places."""

    def make(self, content: torch.Tensor, region: Box, places: Sequence[Place], step_bytes: int) -> None:
        """Makes what ``content``, the slot's box ``region`` in its stored dtype, gives, and writes it to ``places``.

        Queues work on the current stream, and waits for nothing."""


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
