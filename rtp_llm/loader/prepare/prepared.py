"""From a directory to a checked plan and an empty model, headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from rtp_llm.checkpoint import Catalog, read_catalog, read_config
from rtp_llm.collector import collector_paused
from rtp_llm.layers.base import expert_slots, param_specs
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.prepare.dtype import choose_dtype
from rtp_llm.loader.prepare.eplb import with_experts
from rtp_llm.loader.prepare.fingerprint import content_lines
from rtp_llm.loader.prepare.quantise import declared_in, is_inline, quantise, quantise_inline, quantised_mapping
from rtp_llm.models.family import Family
from rtp_llm.models.registry import find_family
from rtp_llm.parallel.shard import check_divisible
from rtp_llm.parallel.world import agree
from rtp_llm.plan.join import join
from rtp_llm.plan.plan import LoadPlan, ModelSide, digest


@dataclass(frozen=True, slots=True)
class Prepared:
    """The result of reading headers and configuration.  ``model`` is on the meta device."""

    raw_config: Mapping[str, Any]
    family: Family
    model: nn.Module
    plan: LoadPlan

    @property
    def catalog(self) -> Catalog:
        return self.plan.catalog

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that parameters have unless a layer says otherwise."""
        found: torch.dtype = getattr(torch, self.plan.model.dtype)
        return found


@collector_paused()
def prepare(context: LoadContext) -> Prepared:
    """Reads headers and config.json, builds the model without memory, and plans.

    The plan is returned with its problems, if checkpoint and model do not fit.

    Raises:
        CheckpointError: files that cannot be trusted or read; everything wrong with them at once.
        ConfigError: a config.json with settings that are not supported.
        PlanError: sizes that cannot be divided over the ranks.
        QuantizationError: a quantisation that is not known, or tensors that are not what it says.
    """
    settings, parallel = context.settings, context.parallel
    groups = context.world.groups(parallel, context.watch)
    catalog = read_catalog(context.directory)
    catalog.raise_for_problems()
    raw = read_config(context.directory)
    declared = declared_in(raw, catalog.directory, settings.quantization)
    family = find_family(raw["architectures"])
    implementation = family.load()
    names = frozenset(t.name for t in catalog.tensors)
    config = implementation.parse_config(raw, names)
    conditions = implementation.conditions(config)
    check_divisible(conditions, parallel.tp_size)
    groups = with_experts(groups, parallel, implementation.experts(config))
    dtype = choose_dtype(settings, raw, catalog)
    model = implementation.build(config, groups, getattr(torch, dtype))
    mapping = quantised_mapping(implementation.mapping(config, names), declared)
    quantization = None
    if declared is not None:
        quantization = quantise(model, catalog, mapping, declared, conditions)
    elif settings.quantization is not None and is_inline(settings.quantization):
        quantization = quantise_inline(model, settings.quantization)
    params, experts = tuple(param_specs(model)), expert_slots(model)
    side = ModelSide(raw["architectures"][0], family.name, parallel, dtype, params, experts, quantization)
    return Prepared(raw, family, model, join(catalog, mapping, side))


def agree_on(context: LoadContext, prepared: Prepared, kernel_lines: tuple[str, ...]) -> None:
    """Makes sure that all ranks have planned the same load of the same checkpoint, and run it by the same kernels.

    Raises:
        ParallelError: the same on every rank, with the first line that differs.
    """
    plan = prepared.plan
    content = tuple(content_lines(prepared.catalog, prepared.raw_config)) if context.world.size > 1 else ()
    lines = (*content, *kernel_lines)
    agree(context.watch, digest(iter((plan.digest, *lines))), lambda: chain(plan.agreement_lines(), lines))
