"""Derived parameters: the checkpoint does not hold them, but a tensor that they are computed from while it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rtp_llm.plan.boxes import Box, Shape

if TYPE_CHECKING:
    import torch


#: Where a part of an output goes: the output's name, the box of it, and memory of that box's shape.
OutputPlace = tuple[str, Box, "torch.Tensor"]


class Transform(Protocol):
    """Computes named outputs from a slot.  Implementations are frozen dataclasses.

    ``step_bytes``: working memory for one step; a step of a single row may take more.
    """

    def needs(self, output: str, box: Box, shape: Shape) -> Box:
        """The box of the slot from which ``box`` of ``output`` is computed; ``shape`` is the slot's full shape."""

    def working_bytes(self, region: Box, step_bytes: int) -> int:
        """The most that :meth:`derive` allocates; the content of ``region`` and the places are not counted."""

    def derive(self, content: torch.Tensor, region: Box, places: Sequence[OutputPlace], step_bytes: int) -> None:
        """Computes the outputs of ``content``, the slot's box ``region`` in its stored dtype, and writes them to ``places``.

        Queues work on the current stream, and waits for nothing."""


@dataclass(frozen=True, slots=True)
class DerivedTile:
    """``parameter[local_box]`` is ``output[box]`` of ``transform`` applied to ``slot``, whose full shape is ``slot_shape``."""

    slot: str
    slot_shape: Shape
    transform: Transform
    output: str
    box: Box
    local_box: Box


@dataclass(frozen=True, slots=True)
class DerivedPlace:
    """``param[local_box]`` takes ``output[box]``."""

    param: str
    local_box: Box
    output: str
    box: Box


@dataclass(frozen=True, slots=True)
class DerivedTensor:
    """A part of a slot, gathered whole on the device in its stored dtype, from which parameters are then derived.

    ``name`` is the target of its delivery, in place of a parameter's.
    """

    name: str
    transform: Transform
    region: Box
    places: tuple[DerivedPlace, ...]
