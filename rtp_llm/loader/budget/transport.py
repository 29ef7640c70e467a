"""Selects the transport of a load, and its fall-back."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rtp_llm.loader.budget.budget import chunked_budget, scratch_budget
from rtp_llm.loader.budget.facts import PageCache, combine_capabilities, combine_facts, find_facts
from rtp_llm.loader.budget.memory import free_bytes
from rtp_llm.loader.budget.preflight import preflight, shortages
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.prepare import Prepared
from rtp_llm.plan.budget import Budget
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, ReaderContext, effective
from rtp_llm.transport.fastsafetensors.group import GroupTransport
from rtp_llm.transport.fastsafetensors.local import LocalTransport
from rtp_llm.transport.fastsafetensors.memory import order_of
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier, absent, probe
from rtp_llm.transport.fastsafetensors.whole import WholeTransport
from rtp_llm.transport.interface import TransferStats, Transport
from rtp_llm.transport.policy import FASTSAFETENSORS, SCRATCH, Decision, asked_for, decide, decided
from rtp_llm.transport.scratch.pool import ReaderPool
from rtp_llm.transport.scratch.reader import ScratchTransport

_log = logging.getLogger("rtp_llm.loader")

#: Threads of fastsafetensors where the settings name no number: its own default.
_THREADS = 16
#: GPUDirect storage needs this device node (nvidia-fs); trying without it closes the process's standard input.
_GDS_NODE = Path("/dev/nvidia-fs0")


@dataclass(frozen=True, slots=True)
class SelectedTransport:
    """The transport, the decision, its budget, and fastsafetensors' tier where it was probed."""

    transport: Transport
    decision: Decision
    budget: Budget
    tier: Tier | None = None


def reader_pool(context: LoadContext) -> AbstractContextManager[ReaderPool[TransferStats] | None]:
    """The own reader's threads, which start while the load is planned; none where the settings name another transport."""
    reader = context.reader
    if context.settings.load_method == FASTSAFETENSORS:
        return nullcontext()
    return ReaderPool(context.device, reader.threads, reader.buffer_bytes)


def scratch(context: LoadContext, prepared: Prepared, pool: ReaderPool[TransferStats] | None = None) -> ScratchTransport:
    """The own reader, by the settings."""
    return ScratchTransport(prepared.catalog.directory, context.device, context.reader, pool)


def select_transport(context: LoadContext, prepared: Prepared, pool: ReaderPool[TransferStats] | None = None) -> SelectedTransport:
    """Decides, the same on all ranks, logs the decision once, and checks that the load fits.

    ``pool``: the own reader's; dismissed if unused.

    Raises:
        PlanError: it does not fit, by any transport.
        ConfigError: settings of fastsafetensors that are not allowed, used or not.
        ParallelError: the first error of any rank.
    """
    method = context.settings.load_method
    if method == SCRATCH:
        return _select_scratch(context, prepared, asked_for(context.mode), None, pool)
    config = effective(context.settings)
    gpudirect = context.device.type == "cuda" and config.copier in ("gds", "fgds") and _GDS_NODE.exists()
    if config.copier == "gds" and not gpudirect and config.loader == "base":
        config = replace(config, copier="nogds")
    cache = PageCache(prepared.plan)
    lack, facts = combine_facts(absent(), find_facts(context, prepared, config, gpudirect, cache), context.watch)
    early = decided(method, context.mode, facts, lack)
    if early is not None:
        return _select_scratch(context, prepared, early, Tier.ABSENT if lack else None, pool)
    if pool is not None:
        pool.dismiss()
    capabilities = combine_capabilities(_configurable(probe(), config), context.watch)
    decision = decide(method, context.mode, facts, capabilities)
    if decision.method == SCRATCH:
        return _select_scratch(context, prepared, decision, capabilities.tier)
    threads = context.settings.reader_threads or _THREADS
    reader = ReaderContext(prepared.catalog.directory, context.device, config, threads, _around_cache(config, cache))
    make = _in_chunks if capabilities.tier is Tier.BOUNDED else _whole_files
    transport, budget = make(context, prepared, reader, capabilities)
    short = next(shortages(context, budget, _least_free(context.device, config)), None)
    decision = decide(method, context.mode, facts, capabilities, None if short is None else short.what)
    if decision.method == SCRATCH:
        return _select_scratch(context, prepared, decision, capabilities.tier)
    return _logged(context, SelectedTransport(transport, decision, budget, capabilities.tier))


def fall_back(context: LoadContext, prepared: Prepared, failed: SelectedTransport, reason: str) -> SelectedTransport:
    """The own reader, after fastsafetensors has failed with ``reason``; logs the decision."""
    reasons = (*failed.decision.reasons, reason)
    decision = replace(failed.decision, method=SCRATCH, level=logging.WARNING, degraded_reason=reason, reasons=reasons)
    budget = scratch_budget(context, prepared)
    return _logged(context, SelectedTransport(scratch(context, prepared), decision, budget, failed.tier))


def _select_scratch(
    context: LoadContext, prepared: Prepared, decision: Decision, tier: Tier | None, pool: ReaderPool[TransferStats] | None = None
) -> SelectedTransport:
    budget = scratch_budget(context, prepared)
    selected = _logged(context, SelectedTransport(scratch(context, prepared, pool), decision, budget, tier))
    preflight(context, budget)
    return selected


def _logged(context: LoadContext, selected: SelectedTransport) -> SelectedTransport:
    if context.world.rank == 0:
        _log.log(selected.decision.level, "%s", selected.decision.text)
    return selected


def _least_free(device: torch.device, config: EffectiveConfig) -> int:
    """Bytes that a load may take: free memory, at most fastsafetensors' own budget."""
    free = free_bytes(device)
    return free if config.device_memory_budget is None else min(free, config.device_memory_budget)


def _configurable(capabilities: Capabilities, config: EffectiveConfig) -> Capabilities:
    """What the package can do with the settings: without its parts it takes them from the environment, which is never written."""
    if capabilities.tier is not Tier.WHOLE or (config.source == "defaults" and config.direct is None):
        return capabilities
    return replace(capabilities, tier=Tier.TOO_OLD, reason=f"the installed wheel cannot be given the settings of {config.source}")


def _whole_files(
    context: LoadContext, prepared: Prepared, reader: ReaderContext, capabilities: Capabilities
) -> tuple[WholeTransport, Budget]:
    rest = scratch(context, prepared)
    whole = WholeTransport(reader, capabilities, context.mode, free_bytes(context.device), rest)
    return whole, replace(scratch_budget(context, prepared), transport=FASTSAFETENSORS, staging=whole.staging_bytes(prepared.plan))


def _in_chunks(context: LoadContext, prepared: Prepared, reader: ReaderContext, capabilities: Capabilities) -> tuple[Transport, Budget]:
    plan, world, watch, config = prepared.plan, context.world, context.watch, reader.config
    # All ranks need equal chunks, whatever each has resident.
    chunk_bytes = min(watch.all_gather_json(config.chunk_for(plan.bytes_resident)))
    order = order_of(plan, context.mode, chunk_bytes, world.size)
    budget = chunked_budget(context, prepared, order, world.rank, config)
    if world.size == 1:
        return LocalTransport(reader, tuple(chunk for _, chunk in order)), budget
    terms = f"mode {context.mode.value} tier {capabilities.tier.name} chunk {chunk_bytes} depth {config.depth}"
    return GroupTransport(reader, order, terms, world, watch), budget


def _around_cache(config: EffectiveConfig, cache: PageCache) -> dict[str, bool]:
    """For each file whether to read around the page cache: by the settings, else where caching it would only evict other files.

    Around the cache, cached data is read 15 times slower, and other data no faster (benchmark/fastsafetensors.md).
    """
    if config.direct is not None:
        return dict.fromkeys(cache.sizes, config.direct)
    crowded = cache.crowded()
    return {name: crowded and cache.bytes[name] < size // 2 for name, size in cache.sizes.items()}
