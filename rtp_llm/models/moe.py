"""Configuration, conditions, tensor names and model that families with experts share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from rtp_llm.layers.mlp import GatedMLP
from rtp_llm.layers.moe import MoE, MoEShape
from rtp_llm.layers.router import RENORMALISE_EPSILON, Routing, unroutable
from rtp_llm.layers.transformer import CausalLM
from rtp_llm.models.decoder import DecoderConfig, build_decoder, decoder_conditions
from rtp_llm.models.decoder_mapping import decoder_mapping
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.reader import MAX_LAYERS, FieldReader
from rtp_llm.parallel.experts import ExpertLayers
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility
from rtp_llm.plan import rules
from rtp_llm.plan.experts import ExpertNames, expert_rules, swapped_names
from rtp_llm.plan.rules import Rule, SkipLayers

#: The most experts of a layer, and of all layers.  Published models have up to 512 and some 25,000.  Planning takes time and
#: memory for each, before anything else shows that a configuration is absurd.
MAX_EXPERTS = 4096
MAX_ALL_EXPERTS = 2**17

#: The ways of choosing experts, as ``topk_method`` names them; see :mod:`rtp_llm.layers.router`.
RoutingMethod = Literal["greedy", "group_limited_greedy", "noaux_tc"]


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The experts of a model: their shape, and the layers that have them instead of a dense MLP."""

    shape: MoEShape
    layers: tuple[int, ...]

    @property
    def experts(self) -> ExpertLayers | None:
        """The experts to divide between expert-parallel ranks."""
        return ExpertLayers(self.shape.routing.experts, self.layers) if self.layers else None

    def conditions(self) -> tuple[Divisibility, ...]:
        """Experts and shared experts are split over the tensor-parallel ranks."""
        if not self.layers:
            return ()
        found = [Divisibility("elements of an expert's intermediate size", self.shape.intermediate_size)]
        if self.shape.shared_size is not None:
            found.append(Divisibility("elements of the shared experts' intermediate size", self.shape.shared_size))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class MoEDecoderConfig:
    """A decoder with grouped-query attention, some of whose layers have experts.

    ``mtp_layers``: layers after the last one for multi-token prediction, which may be in the checkpoint and are not run.
    """

    decoder: DecoderConfig
    moe: MoEConfig
    mtp_layers: int = 0


def read_expert_count(reader: FieldReader, name: str, default: int, layers: int) -> int:
    """The number of experts of each of ``layers`` layers."""
    count = reader.integer(name, default, most=MAX_EXPERTS)
    if count * layers > MAX_ALL_EXPERTS:
        reader.fail(name, f"at most {MAX_ALL_EXPERTS} experts in all layers", actual=f"{count} in each of {layers}")
        return 1
    return count


@dataclass(frozen=True, slots=True)
class RoutingFields:
    """Names of routing fields that differ between families."""

    top_k: str = "num_experts_per_tok"
    groups: str = "n_group"
    top_groups: str = "topk_group"
    scale: str = "routed_scaling_factor"


@dataclass(frozen=True, slots=True)
class RoutingDefaults:
    """How a family routes.  ``top_k``, ``groups``, ``top_groups`` and ``scale`` are the defaults of their fields.

    ``scale``: None for a family without that field.  ``renormalise``, ``wide`` and ``biased``: as in :class:`Routing`.
    """

    method: RoutingMethod
    top_k: int
    groups: int = 1
    top_groups: int = 1
    scale: float | None = None
    renormalise: bool = False
    wide: bool = False
    biased: bool = False


def read_routing(reader: FieldReader, experts: int, defaults: RoutingDefaults, fields: RoutingFields = RoutingFields()) -> Routing:
    """The routing of a layer of ``experts``; a combination that no routing can do is a problem of the reader.

    ``greedy`` reads no groups.  ``noaux_tc`` scores by sigmoid, corrects by a bias, and adds an epsilon where it renormalises,
    as DeepSeek-V3 does.
    """
    corrected = defaults.method == "noaux_tc"
    k = reader.integer(fields.top_k, defaults.top_k, most=MAX_EXPERTS)
    groups = top_groups = 1
    if defaults.method != "greedy":
        groups = reader.optional_integer(fields.groups, defaults.groups, most=MAX_EXPERTS) or 1
        top_groups = reader.optional_integer(fields.top_groups, defaults.top_groups, most=MAX_EXPERTS) or 1
    scale = 1.0 if defaults.scale is None else reader.number(fields.scale, defaults.scale)
    problems = list(unroutable(experts, k, groups, top_groups, corrected))
    for argument, expected, actual in problems:
        reader.fail(getattr(fields, argument), expected, fault=ModelFault.UNSUPPORTED_FIELD, actual=actual)
    if problems:
        k = groups = top_groups = 1
    return Routing(
        experts=experts,
        top_k=k,
        scoring="sigmoid" if corrected else "softmax",
        groups=groups,
        top_groups=top_groups,
        best_two=corrected,
        corrected=corrected,
        renormalise=defaults.renormalise,
        epsilon=RENORMALISE_EPSILON if corrected and defaults.renormalise else 0.0,
        scale=scale,
        wide=defaults.wide,
        biased=defaults.biased,
    )


def read_stepped_layers(reader: FieldReader, layers: int) -> tuple[int, ...]:
    """Qwen's layers with experts: every ``decoder_sparse_step``-th, without those of ``mlp_only_layers``."""
    step = reader.integer("decoder_sparse_step", 1, most=MAX_LAYERS)
    dense = reader.raw.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        reader.fail("mlp_only_layers", "a list of layer numbers")
        dense = ()
    without = frozenset(dense)
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in without)


def moe_conditions(config: MoEDecoderConfig) -> tuple[Divisibility, ...]:
    """The decoder's conditions (that on its intermediate size only if some layer is dense), and those of experts."""
    dense = decoder_conditions(config.decoder)
    if len(config.moe.layers) == config.decoder.layers:
        dense = tuple(c for c in dense if c.what != "elements of intermediate_size")
    return dense + config.moe.conditions()


def moe_layers(config: MoEDecoderConfig) -> ExpertLayers | None:
    """The experts to divide between expert-parallel ranks."""
    return config.moe.experts


def moe_block(moe: MoEConfig, dense: Callable[[int], nn.Module], groups: Groups, dtype: torch.dtype) -> Callable[[int], nn.Module]:
    """A function that builds the feed-forward block of a layer, by its number: experts, or ``dense``."""
    sparse = frozenset(moe.layers)

    def block(layer: int) -> nn.Module:
        return MoE(layer, moe.shape, groups=groups, dtype=dtype) if layer in sparse else dense(layer)

    return block


def build_moe_decoder(config: MoEDecoderConfig, groups: Groups, dtype: torch.dtype) -> CausalLM:
    """The model of one rank, on the meta device."""
    d = config.decoder

    def dense(layer: int) -> nn.Module:
        return GatedMLP(f"layers.{layer}.mlp", d.mlp, tp=groups.tp, dtype=dtype)

    return build_decoder(d, groups, dtype, mlp=moe_block(config.moe, dense, groups, dtype))


@dataclass(frozen=True, slots=True)
class MoENames:
    """Tensor names of a layer of experts below ``at`` (a template with the layer's number); "" for none.

    ``experts``: the spellings of the experts, the published one first.
    """

    at: str = "layers.{}.mlp"
    router: str = "gate.weight"
    bias: str = ""
    shared: str = ""
    shared_gate: str = ""
    experts: tuple[ExpertNames, ...] = field(default_factory=lambda: (ExpertNames("layers.{}.mlp.experts"),))


def moe_rules(moe: MoEConfig, *names: MoENames) -> tuple[Rule, ...]:
    """Rules for the layers of experts, in all spellings."""
    return tuple(rule for one in names for rule in _moe_rules(moe.shape, one)) if moe.layers else ()


def _moe_rules(shape: MoEShape, names: MoENames) -> Iterable[Rule]:
    yield Rule(f"{names.at}.{names.router}", "layers.{}.router.weight")
    if shape.routing.corrected or shape.routing.biased:
        yield Rule(f"{names.at}.{names.bias}", "layers.{}.router.bias")
    if shape.shared_size is not None:
        for part in ("gate", "up", "down"):
            yield Rule(f"{names.at}.{names.shared}.{part}_proj.weight", f"layers.{{}}.shared.{part}.weight")
        if shape.shared_gate:
            yield Rule(f"{names.at}.{names.shared_gate}.weight", "layers.{}.shared_gate.weight")
    yield from expert_rules(shape.routing.experts, *names.experts)


def with_moe(dense: rules.Mapping, moe: MoEConfig, *names: MoENames, skipped_layers: SkipLayers | None = None) -> rules.Mapping:
    """The mapping of the dense part and the experts."""
    refused = swapped_names(*(experts for one in names for experts in one.experts))
    return rules.Mapping((*dense.rules, *moe_rules(moe, *names)), dense.skips, refused, skipped_layers)


def moe_mapping(config: MoEDecoderConfig, *names: MoENames) -> rules.Mapping:
    """Rules for the tensors of this configuration; layers for multi-token prediction are skipped."""
    skipped = mtp_skip(config.decoder.layers, config.mtp_layers)
    return with_moe(decoder_mapping(config.decoder), config.moe, *names, skipped_layers=skipped)


def mtp_skip(layers: int, mtp_layers: int) -> SkipLayers | None:
    """The rule that skips the layers after the last one, with their experts."""
    reason = "layers for multi-token prediction are not run"
    return SkipLayers("layers.{}", layers, layers + mtp_layers, reason) if mtp_layers else None


def defaulted(raw: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """``raw`` with the family's own defaults for absent fields."""
    return {**defaults, **raw}
