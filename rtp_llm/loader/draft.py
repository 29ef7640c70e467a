"""From a directory to a checked plan and an empty model, headers only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rtp_llm.checkpoint import Catalog, read_catalog, read_config
from rtp_llm.collector import collector_paused
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.layers.base import expert_slots, param_specs
from rtp_llm.loader.eplb import with_experts
from rtp_llm.loader.finish import finish_bytes
from rtp_llm.loader.quantise import declared_in, is_inline, quantise, quantise_inline, quantised_mapping
from rtp_llm.loader.route import choose_dtype
from rtp_llm.loader.stages import step_bytes
from rtp_llm.models.family import Family
from rtp_llm.models.registry import resolve
from rtp_llm.parallel.groups import Groups, groups_at
from rtp_llm.parallel.shard import check_divisible
from rtp_llm.plan.join import join
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.plan.room import Hands, room_for
from rtp_llm.transport.scratch.staging import staging_bytes

#: Reader threads beyond this only wait for the interpreter's lock: on an H200 with 16 cores, 12 threads move 46 GB/s of
#: cached files, 16 threads 41 and 8 threads 40.
MOST_READERS = 12


@dataclass(frozen=True, slots=True)
class Draft:
    """All that is known before a byte of weights is read.  ``model`` is on the meta device."""

    catalog: Catalog
    raw_config: Mapping[str, Any]
    family: Family
    model: nn.Module
    plan: LoadPlan
    dtype: str


def readers(load: LoadConfig, device_type: str) -> int:
    """The number of reader threads that the settings mean; beside a GPU a quarter of the CPUs is left to its driver."""
    cpus = len(os.sched_getaffinity(0))
    return load.reader_threads or max(1, min(MOST_READERS, cpus * 3 // 4 if device_type == "cuda" else cpus))


def hands(load: LoadConfig, device_type: str) -> Hands:
    """Who brings the parts of tensors that parameters are made of, if the own reader does; a GPU makes one at a time."""
    threads = readers(load, device_type)
    return Hands(threads, load.buffer_mib << 20, 1 if device_type == "cuda" else threads, step_bytes(device_type))


@collector_paused()
def draft(directory: str | os.PathLike[str], parallel: ParallelConfig, load: LoadConfig, groups: Groups, device_type: str) -> Draft:
    """Reads headers and config.json, builds the model without memory, and plans.

    The plan is returned with its problems, if checkpoint and model do not fit.

    Raises:
        CheckpointError: files that cannot be trusted or read; everything wrong with them at once.
        ConfigError: a config.json that asks for what is not there.
        PlanError: sizes that cannot be divided over the ranks.
        QuantizationError: a quantisation that is not known, or tensors that are not what it says.
    """
    directory = os.fspath(directory)
    catalog = read_catalog(directory)
    catalog.raise_for_problems()
    raw = read_config(directory)
    declared = declared_in(raw, catalog.directory, load.quantization)
    family = resolve(raw["architectures"])
    implementation = family.load()
    names = frozenset(t.name for t in catalog.tensors)
    config = implementation.parse_config(raw, names)
    conditions = implementation.conditions(config)
    check_divisible(conditions, parallel.tp_size)
    groups = with_experts(groups, parallel, implementation.experts(config))
    dtype = choose_dtype(load, raw, catalog)
    model = implementation.build(config, groups, getattr(torch, dtype))
    mapping = quantised_mapping(implementation.mapping(config, names), declared)
    quantization = None
    if declared is not None:
        quantization = quantise(model, catalog, mapping, declared, conditions)
    elif load.quantization is not None and is_inline(load.quantization):
        quantization = quantise_inline(model, load.quantization)
    plan = join(
        catalog,
        mapping,
        param_specs(model),
        architecture=raw["architectures"][0],
        family=family.name,
        parallel=parallel,
        dtype=dtype,
        bytes_staging=staging_bytes(device_type, readers(load, device_type), load.buffer_mib * 1024 * 1024),
        experts=expert_slots(model),
        quantization=quantization,
        bytes_finish=finish_bytes(model, device_type),
    )
    plan = replace(plan, bytes_making=room_for(plan, hands(load, device_type)).nbytes)
    return Draft(catalog, raw, family, model, plan, dtype)


def build_plan(path: str | os.PathLike[str], parallel: ParallelConfig | None = None, load: LoadConfig | None = None) -> LoadPlan:
    """The plan of one rank, from headers only; nothing is allocated, and no other rank is asked.

    ``problems``, ``missing`` and ``unexpected`` are filled where the checkpoint does not fit the model;
    ``plan.raise_for_problems()`` makes an error of them.  Other errors as in :func:`draft`.
    """
    parallel = parallel or ParallelConfig()
    load = load or LoadConfig.from_environment(os.environ)
    return draft(path, parallel, load, groups_at(parallel), planned_device(load)).plan


def planned_device(load: LoadConfig) -> str:
    """The kind of device that a plan is for, where none is looked for: ``cpu`` or ``cuda``."""
    return "cpu" if load.device == "cpu" or not torch.cuda.is_available() else "cuda"
