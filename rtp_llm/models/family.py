"""What a model family is: an entry of the registry, and the functions that its package provides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rtp_llm.config.load import QUANTIZATION_METHODS
from rtp_llm.parallel.experts import ExpertLayers
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divides
from rtp_llm.plan import rules


def no_experts(config: Any) -> None:
    """What dense families have of experts."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a family reads its configuration, maps its checkpoint and builds its model.

    parse_config(raw, names): ``config.json`` and the tensor names of the checkpoint to a frozen dataclass.  The names
        settle what the configuration leaves open or gets wrong: whether there is a head, a pooler, a prefix.  Raises
        ``ConfigError`` with every bad field.
    conditions(config): what the number of tensor-parallel ranks must fulfil.
    mapping(config): rules for every tensor that the model needs, and skips, with reasons, for those it does not.
    build(config, groups, dtype): the model of one rank on the meta device, in the dtype that its parameters will have.
    experts(config): how many experts there are, and in which layers; None for a model, or a family, without any.
    """

    parse_config: Callable[[Mapping[str, Any], Collection[str]], Any]
    conditions: Callable[[Any], tuple[Divides, ...]]
    mapping: Callable[[Any], rules.Mapping]
    build: Callable[[Any, Groups, torch.dtype], nn.Module]
    experts: Callable[[Any], ExpertLayers | None] = no_experts


@dataclass(frozen=True, slots=True)
class Features:
    """What a family supports beyond one rank and plain weights.

    Every method of quantisation works on linear layers and on experts, whatever the family they stand in.
    """

    tensor_parallel: bool = True
    expert_parallel: bool = False
    quantization: tuple[str, ...] = QUANTIZATION_METHODS
    online_update: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the registry.  ``module`` is the package that holds the :class:`Implementation`, as ``FAMILY``."""

    name: str
    kind: Literal["causal", "encoder"]
    architectures: tuple[str, ...]
    module: str
    features: Features = Features()

    def load(self) -> Implementation:
        """Imports the implementation; until then a family costs nothing."""
        family = importlib.import_module(self.module).FAMILY
        assert isinstance(family, Implementation), self.module
        return family
