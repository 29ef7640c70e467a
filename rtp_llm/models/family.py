"""A model family: an entry of the registry, and the functions of its package."""

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
    """The experts of dense families: none."""


@dataclass(frozen=True, slots=True)
class Implementation:
    """How a family reads its configuration, maps its checkpoint and builds its model.

    read_config(raw, names): ``config.json`` and the checkpoint's tensor names, without prefix, to a frozen dataclass.
        The names decide what the configuration does not say: whether there is a head, or a pooler.  Raises
        ``ConfigError`` with every bad field.
    conditions(config): conditions on the number of tensor-parallel ranks.
    rules(config): rules, without prefix, for every tensor of the model, and skips with reasons for others.
    build(config, groups, dtype): the model of one rank on the meta device, in the dtype that its parameters will have.
    experts(config): the number of experts, and their layers; None for a model without experts.
    prefixes: the possible prefixes of tensor names.
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

    Every quantisation method works on linear layers and experts of every family.
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
        """Imports the implementation, so that unused families cost nothing."""
        family = importlib.import_module(self.module).FAMILY
        assert isinstance(family, Implementation), self.module
        return family
