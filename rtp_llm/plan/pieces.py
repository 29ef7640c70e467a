"""The model's side of the plan: how each local parameter is tiled by parts of logical tensors.

A *slot* is a logical, full tensor with a name that checkpoint mapping and layer agree on, for example
``layers.3.attn.q.weight``.  A layer says for each of its parameters which box of which slot fills which box of the
parameter.  Tensor parallelism, fusion (QKV, gate/up), KV-head replication and vocabulary padding only choose
other pieces.  A layer states pieces and never loads anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rtp_llm.plan.boxes import Box, Shape, whole
from rtp_llm.plan.derived import DerivedTile


@dataclass(frozen=True, slots=True)
class Piece:
    """``slot[slot_box]`` fills ``parameter[local_box]``; both boxes hold the same number of elements in the same order.

    ``slot_shape`` is the full logical shape that the model expects of the slot; the plan refuses a checkpoint that
    provides another.
    """

    slot: str
    slot_shape: Shape
    slot_box: Box
    local_box: Box

    @classmethod
    def full(cls, slot: str, shape: Shape) -> Piece:
        """The whole slot fills the whole parameter."""
        return cls(slot, shape, whole(shape), whole(shape))


@dataclass(frozen=True, slots=True)
class Fill:
    """``parameter[local_box]`` is padding that no checkpoint provides; it is set to ``value``."""

    local_box: Box
    value: float = 0.0


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One local parameter: its name in the module tree, its local shape, its torch dtype name, and its tiling.

    ``exact``: a stored dtype of less precision is refused, since the model needs what it has lost.
    """

    name: str
    shape: Shape
    dtype: str
    tiles: tuple[Piece | Fill | DerivedTile, ...]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class ExpertSlots:
    """All experts of one layer, on whichever rank they live: the slots ``{slot}.{e}.{part}`` for each expert and part.

    A rank's parameters name the slots of its own experts only.  These name the others: their tensors are not unexpected, and
    are reported if missing.  The slots below ``router`` have a row for each expert.  ``parts``: name, full shape, torch's name
    of the parameter's dtype.  ``held``: the experts of each expert-parallel rank.
    """

    layer: int
    slot: str
    router: str
    count: int
    parts: tuple[tuple[str, Shape, str], ...]
    held: tuple[tuple[int, ...], ...]

    def slots(self) -> Iterator[tuple[str, Shape, str]]:
        """Every slot with its full shape and its parameter's dtype."""
        for expert in range(self.count):
            for part, shape, dtype in self.parts:
                yield f"{self.slot}.{expert}.{part}", shape, dtype
