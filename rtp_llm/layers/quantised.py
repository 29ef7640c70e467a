"""Layers whose weights may be held quantised.

Such a layer is built plain.  Once the checkpoint has been looked at, :meth:`Quantisable.adopt` replaces a plain weight by the
tensors of a scheme, all on the meta device still; from then on pieces, checks and products are the scheme's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rtp_llm.layers.base import Planned
from rtp_llm.plan.boxes import Box, Shape, view
from rtp_llm.plan.derived import DerivedTile
from rtp_llm.plan.pieces import Fill, Piece
from rtp_llm.quantization.forms import Laid, Matrix, lay
from rtp_llm.quantization.inline import made_tiles
from rtp_llm.quantization.kernels import Kernel
from rtp_llm.quantization.limits import DeferredChecks, ExactValues, Seen, ValueRange
from rtp_llm.quantization.scaled import Scaled
from rtp_llm.quantization.scheme import Finding, Scheme

#: The attribute of a layer's only weight; the tensors of a scheme take its place under their own names.
WEIGHT = "weight"


@dataclass(slots=True)
class Held:
    """One quantised weight of a layer: a parameter for each tensor of its scheme, by attribute name."""

    scheme: Scheme
    matrices: tuple[Matrix, ...]
    laid: dict[str, Laid] = field(default_factory=dict)
    made: bool = False

    def tiles(self, attribute: str) -> tuple[Piece | Fill | DerivedTile, ...]:
        """The tiles of a parameter: tensors of the checkpoint, or tensors derived from plain ones if ``made``."""
        laid = self.laid[attribute]
        if self.made:
            assert isinstance(self.scheme, Scaled)
            return made_tiles(laid, self.matrices, self.scheme.grid)
        return laid.tiles


class Quantisable(Planned):
    """A layer with matrices.  ``held``: its quantised weights, by the attribute of the plain one; empty if all are plain."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Held] = {}
        self.products: dict[str, Kernel] = {}

    def weights(self) -> dict[str, tuple[Matrix, ...]]:
        """The matrices of each weight, by attribute: stacked by rows, ordered by their place in the stack of experts."""
        raise AssertionError(f"{type(self).__name__} states no matrices")

    def adopt(self, attribute: str, scheme: Scheme, *, made: bool = False) -> None:
        """Replaces a plain weight by the tensors of ``scheme``.  ``made``: quantised from plain tensors during the load."""
        held = Held(scheme, self.weights()[attribute], made=made)
        delattr(self, attribute)
        for form in scheme.forms:
            name = form.name if attribute == WEIGHT else f"{attribute}_{form.name}"
            held.laid[name] = lay(form, held.matrices)
            self.declare(name, held.laid[name].shape, getattr(torch, form.dtype))
        self.held[attribute] = held

    def held_tiles(self) -> dict[str, tuple[Piece | Fill | DerivedTile, ...]]:
        """The tiles of all tensors of quantised weights."""
        return {name: held.tiles(name) for held in self.held.values() for name in held.laid}

    def tensors(self, attribute: str, index: int) -> dict[str, torch.Tensor]:
        """The tensors of one matrix, by their names in the scheme."""
        return {
            laid.form.name: _part(getattr(self, name).data, laid.boxes[index], laid.form.shape(self.held[attribute].matrices[index]))
            for name, laid in self.held[attribute].laid.items()
        }

    def dense(self, attribute: str, place: int | None = None) -> torch.Tensor:
        """A weight (of one ``place``, in a stack) in float32: its matrices stacked by rows."""
        held = self.held[attribute]
        parts = [
            held.scheme.dequantise(self.tensors(attribute, i), matrix) for i, matrix in enumerate(held.matrices) if matrix.place == place
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def watched(self, checks: DeferredChecks) -> Iterator[tuple[Seen, ValueRange | ExactValues]]:
        """Adds the values to check to ``checks``, a whole parameter at a time if all its matrices have one limit.  Yields what each
        must be."""
        for held in self.held.values():
            limits = [held.scheme.limits(matrix) for matrix in held.matrices]
            for name, laid in held.laid.items():
                wanted = [limit.get(laid.form.name) for limit in limits]
                memory = getattr(self, name).data
                alike = len({*wanted}) == 1 and not isinstance(wanted[0], ExactValues)
                parts = [memory] if alike else [view(memory, box) for box in laid.boxes]
                for limit, part in zip(wanted, parts, strict=False):
                    if limit is not None and part.numel():
                        yield checks.add(part) if isinstance(limit, ExactValues) else checks.extremes(part), limit

    def findings(self) -> Iterator[tuple[Matrix, Finding]]:
        """Invalid values of quantised weights, after the load."""
        for attribute, held in self.held.items():
            for i, matrix in enumerate(held.matrices):
                for finding in held.scheme.check(self.tensors(attribute, i), matrix):
                    yield matrix, finding


def _part(memory: torch.Tensor, box: Box, shape: Shape) -> torch.Tensor:
    """A box of a parameter, without the leading dimensions that select the matrix."""
    part = view(memory, box)
    return part.reshape(part.shape[part.dim() - len(shape) :])
