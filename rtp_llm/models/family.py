"""What a model family is: an entry of the registry, and the functions that its package provides."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from rtp_llm.config.load import QUANTIZATION_METHODS
from rtp_llm.models.prefixes import CAUSAL, Prefixes
from rtp_llm.parallel.experts import ExpertLayers
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility
from rtp_llm.plan import rules as plan_rules


def no_experts(config: Any) -> None:
    """What dense families have of experts."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a family reads its configuration, maps its checkpoint and builds its model.

    read_config(raw, names): ``config.json`` and the tensor names of the checkpoint, without their prefix, to a frozen dataclass.
        The names settle what the configuration leaves open or gets wrong: whether there is a head, or a pooler.  Raises
        ``ConfigError`` with every bad field.
    conditions(config): what the number of tensor-parallel ranks must fulfil.
    rules(config): rules, without a prefix, for every tensor that the model needs, and skips, with reasons, for those it does not.
    build(config, groups, dtype): the model of one rank on the meta device, in the dtype that its parameters will have.
    experts(config): how many experts there are, and in which layers; None for a model, or a family, without any.
    prefixes: what may stand before tensor names.
    """

    read_config: Callable[[Mapping[str, Any], Collection[str]], Any]
    conditions: Callable[[Any], tuple[Divisibility, ...]]
    rules: Callable[[Any], plan_rules.Mapping]
    build: Callable[[Any, Groups, torch.dtype], nn.Module]
    experts: Callable[[Any], ExpertLayers | None] = no_experts
    prefixes: Prefixes = CAUSAL

    def parse_config(self, raw: Mapping[str, Any], names: Collection[str]) -> Any:
        """The configuration of a checkpoint with these tensor ``names``.

        Raises:
            ConfigError: with every bad field.
        """
        return self.read_config(raw, self.prefixes.stripped(names))

    def mapping(self, config: Any, names: Collection[str]) -> plan_rules.Mapping:
        """The mapping of a checkpoint with these tensor ``names``."""
        return self.prefixes.mapping(self.rules(config), names)


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
