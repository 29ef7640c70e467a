"""What makes a module plannable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from rtp_llm.errors import PlanError, internal
from rtp_llm.layers.faults import LayerFault
from rtp_llm.plan.derived import DerivedTile
from rtp_llm.plan.pieces import ExpertSlots, Fill, ParamSpec, Piece


class Planned(nn.Module):
    """A module with parameters, each tiled by parts of slots, for its rank.

    Parameters are on the ``meta`` device, in their final local shape and dtype.  The loader allocates them once and fills them
    by the plan.
    """

    def tiles(self) -> Mapping[str, tuple[Piece | Fill | DerivedTile, ...]]:
        """The tiles of each of this module's own parameters, by attribute name."""
        raise AssertionError(f"{type(self).__name__} states no tiles")

    def exact(self) -> frozenset[str]:
        """Attribute names of parameters whose dtype in the checkpoint must not be narrower."""
        return frozenset()

    def experts(self) -> ExpertSlots | None:
        """The slots of all experts, if this module holds some of them."""
        return None

    def declare(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Registers a parameter on the meta device."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def param_specs(model: nn.Module) -> Iterator[ParamSpec]:
    """Every parameter of ``model`` with its tiling, in module order.

    Raises:
        PlanError: ``INTERNAL``, for a parameter or buffer that no :class:`Planned` module states: it would stay uninitialised.
    """
    stated = set()
    for prefix, module in model.named_modules():
        if not isinstance(module, Planned):
            continue
        tiles, exact = module.tiles(), module.exact()
        for attribute, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{attribute}" if prefix else attribute
            stated.add(name)
            dtype = str(parameter.dtype).removeprefix("torch.")
            yield ParamSpec(name, tuple(parameter.shape), dtype, tiles[attribute], attribute in exact)
    unstated = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    unstated -= stated
    if unstated:
        raise PlanError([internal(LayerFault.INTERNAL, "no module plans this parameter", tensor=name) for name in unstated])


def expert_slots(model: nn.Module) -> tuple[ExpertSlots, ...]:
    """The experts of every layer that has some, on all ranks, in module order."""
    found = (module.experts() for module in model.modules() if isinstance(module, Planned))
    return tuple(slots for slots in found if slots is not None)
