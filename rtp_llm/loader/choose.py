"""Which transport a load gets, and what happens when that fails."""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.config import LoadConfig
from rtp_llm.config.load import StackedMode
from rtp_llm.loader.draft import Draft, readers
from rtp_llm.loader.memory import free_bytes
from rtp_llm.loader.predict import in_chunks
from rtp_llm.loader.preflight import host, preflight, shortages
from rtp_llm.parallel.watch import Watch
from rtp_llm.parallel.world import World
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport import pagecache
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, effective
from rtp_llm.transport.fastsafetensors.group import GroupTransport
from rtp_llm.transport.fastsafetensors.local import LocalTransport, Means
from rtp_llm.transport.fastsafetensors.memory import order_of
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier, absent, probe
from rtp_llm.transport.fastsafetensors.sequence import local_pieces, splits
from rtp_llm.transport.fastsafetensors.whole import WholeTransport
from rtp_llm.transport.interface import Moved, Transport
from rtp_llm.transport.policy import FASTSAFETENSORS, SCRATCH, Decision, Facts, asked_for, compares, decide, decided
from rtp_llm.transport.scratch.reader import ScratchTransport
from rtp_llm.transport.scratch.team import Team

_log = logging.getLogger("rtp_llm.loader")

#: Threads of fastsafetensors where the settings name no number: its own default.
_THREADS = 16
#: Its device node (nvidia-fs): without it no GPUDirect storage, and a try closes the process's standard input.
_GDS_NODE = Path("/dev/nvidia-fs0")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The transport, why, the plan with this transport's buffers in it, and fastsafetensors' tier."""

    transport: Transport
    decision: Decision
    plan: LoadPlan
    tier: Tier | None = None


def reader_team(device: torch.device, load: LoadConfig) -> AbstractContextManager[Team[Moved] | None]:
    """The own reader's threads, which get ready while the load is planned; none where another transport was asked for."""
    return nullcontext() if load.load_method == FASTSAFETENSORS else Team(device, readers(load, device.type), load.buffer_mib << 20)


def scratch(drafted: Draft, device: torch.device, load: LoadConfig, team: Team[Moved] | None = None) -> ScratchTransport:
    """The own reader, as the settings want it."""
    threads, buffer_bytes, most_gap = readers(load, device.type), load.buffer_mib << 20, load.read_gap_kib << 10
    return ScratchTransport(drafted.catalog.directory, device, threads, buffer_bytes, most_gap, team)


def choose(drafted: Draft, device: torch.device, load: LoadConfig, world: World, watch: Watch, team: Team[Moved] | None = None) -> Chosen:
    """Decides, on all ranks alike, logs the decision once, and makes sure that the load fits.

    ``team``: the own reader's; dismissed if it will not be used.

    Raises:
        PlanError: it does not fit, by any transport.
        ConfigError: settings of fastsafetensors that are not allowed, whether or not it will be used.
        ParallelError: the first error of any rank.
    """
    mode = StackedMode(load.stacked_moe_mode)
    if load.load_method == SCRATCH:
        return _scratch(drafted, device, load, asked_for(mode), None, world, watch, team)
    config = effective(load)
    gpudirect = device.type == "cuda" and config.copier in ("gds", "fgds") and _GDS_NODE.exists()
    if config.copier == "gds" and not gpudirect and config.loader == "base":
        config = replace(config, copier="nogds")
    cached = _Cached(drafted)
    lack, facts = _together(absent(), _facts(drafted, device, load, world, config, gpudirect, cached), watch)
    early = decided(load.load_method, mode, facts, lack)
    if early is not None:
        return _scratch(drafted, device, load, early, Tier.ABSENT if lack else None, world, watch, team)
    if team is not None:
        team.dismiss()
    capabilities = _least_able(_reached(probe(), config), watch)
    first = decide(load.load_method, mode, facts, capabilities)
    if first.method == SCRATCH:
        return _scratch(drafted, device, load, first, capabilities.tier, world, watch)
    means = Means(drafted.catalog.directory, device, config, load.reader_threads or _THREADS, _direct(config, cached))
    transport, plan = _built(drafted, means, mode, capabilities, load, world, watch)
    short = shortages(plan, device, watch, _least(device, config))
    decision = decide(load.load_method, mode, facts, capabilities, short[0].what if short else None)
    if decision.method == SCRATCH:
        return _scratch(drafted, device, load, decision, capabilities.tier, world, watch)
    return _told(Chosen(transport, decision, plan, capabilities.tier), world)


def _scratch(
    drafted: Draft,
    device: torch.device,
    load: LoadConfig,
    decision: Decision,
    tier: Tier | None,
    world: World,
    watch: Watch,
    team: Team[Moved] | None = None,
) -> Chosen:
    chosen = _told(Chosen(scratch(drafted, device, load, team), decision, drafted.plan, tier), world)
    preflight(chosen.plan, device, watch)
    return chosen


def _told(chosen: Chosen, world: World) -> Chosen:
    if world.rank == 0:
        _log.log(chosen.decision.level, "%s", chosen.decision.text)
    return chosen


def _reached(capabilities: Capabilities, config: EffectiveConfig) -> Capabilities:
    """Without its parts the package takes its configuration from the environment alone, which is never written."""
    if capabilities.tier is not Tier.WHOLE or (config.source == "defaults" and config.direct is None):
        return capabilities
    return replace(capabilities, tier=Tier.TOO_OLD, reason=f"the installed wheel cannot be given the settings of {config.source}")


def _least(device: torch.device, config: EffectiveConfig) -> int:
    """Bytes that a load may take: what is free, and no more than fastsafetensors' own budget."""
    free = free_bytes(device)
    return free if config.device_memory_budget is None else min(free, config.device_memory_budget)


def _built(
    drafted: Draft, means: Means, mode: StackedMode, capabilities: Capabilities, load: LoadConfig, world: World, watch: Watch
) -> tuple[Transport, LoadPlan]:
    plan, config = drafted.plan, means.config
    if capabilities.tier < Tier.BOUNDED:
        whole = WholeTransport(means, capabilities, mode, free_bytes(means.device), scratch(drafted, means.device, load))
        return whole, replace(plan, bytes_staging=whole.staging_bytes(plan))
    # All ranks cut alike, whatever each has resident.
    chunk_bytes = min(int(text) for text in watch.exchange(str(config.chunk_for(plan.bytes_resident)).encode()))
    order = order_of(plan, mode, chunk_bytes, world.size)
    plan = in_chunks(plan, order, world.rank, config, means.device.type)
    if world.size == 1:
        return LocalTransport(means, tuple(chunk for _, chunk in order)), plan
    terms = f"mode {mode.value} tier {capabilities.tier.name} chunk {chunk_bytes} depth {config.depth}"
    return GroupTransport(means, order, terms, world, watch), plan


class _Cached:
    """How much of each of the plan's files is in the page cache, looked at once, if somebody asks."""

    def __init__(self, drafted: Draft) -> None:
        self._directory, self.sizes = Path(drafted.catalog.directory), {f.name: f.size for f in drafted.plan.files}

    @cached_property
    def bytes(self) -> dict[str, int]:
        return {name: pagecache.estimated_cached_bytes(self._directory / name) or 0 for name in self.sizes}


def _facts(
    drafted: Draft, device: torch.device, load: LoadConfig, world: World, config: EffectiveConfig, gpudirect: bool, cached: _Cached
) -> Facts:
    plan = drafted.plan
    where = pagecache.file_system(Path(drafted.catalog.directory))
    network = where is not None and where.network
    warm = whole = touched = 0
    if compares(load.load_method, world.size):
        whole, warm = sum(cached.sizes.values()), sum(cached.bytes.values())
        # Locally what one rank has read the others find in the cache, however often it is fetched.
        pieces = local_pieces(plan, splits(plan.slots, StackedMode.PER_EXPERT), whole) if network else ()
        touched = sum(piece.stop - piece.start for piece in pieces) if network else plan.bytes_read
    return Facts(
        all_safetensors=all(f.format == "safetensors" for f in plan.files),
        strangers=any(note.fault is CheckpointFault.OUTSIDE_INDEX for note in drafted.catalog.notes),
        device_type=device.type,
        ranks=world.size,
        hosts=1,
        file_system="unknown" if where is None else where.kind,
        network=network,
        gpudirect=gpudirect or config.loader == "3fs",
        bytes_cold=whole - warm,
        bytes_warm=warm,
        bytes_ranks=touched,
    )


def _direct(config: EffectiveConfig, cached: _Cached) -> dict[str, bool]:
    """For each file whether to read around the page cache: as the settings say, else where keeping the file would only drive
    out others, because what is not cached of this checkpoint does not fit into free memory.

    Cached data is read 15 times slower around the cache than through it, and other data no faster (benchmark/fastsafetensors.md).
    """
    if config.direct is not None:
        return dict.fromkeys(cached.sizes, config.direct)
    missing = sum(cached.sizes.values()) - sum(cached.bytes.values())
    crowded = missing > free_bytes(torch.device("cpu"))
    return {name: crowded and cached.bytes[name] < size // 2 for name, size in cached.sizes.items()}


def _together(lack: str, mine: Facts, watch: Watch) -> tuple[str, Facts]:
    """Why a rank has no package, if one has none, and the facts of all ranks in one: the coldest cache, what all read; the
    same on every rank."""
    told = {"absent": lack, "host": host(), "facts": asdict(mine)}
    asked = [json.loads(text) for text in watch.exchange(json.dumps(told).encode())]
    lacking = next((rank for rank, a in enumerate(asked) if a["absent"]), None)
    every = [Facts(**a["facts"]) for a in asked]
    coldest = max(every, key=lambda facts: facts.bytes_cold)
    facts = replace(
        coldest,
        device_type="cpu" if any(f.device_type == "cpu" for f in every) else coldest.device_type,
        hosts=len({a["host"] for a in asked}),
        network=any(f.network for f in every),
        gpudirect=all(f.gpudirect for f in every),
        bytes_ranks=sum(f.bytes_ranks for f in every),
    )
    return "" if lacking is None else _of_rank(lacking, asked[lacking]["absent"], len(asked)), facts


def _least_able(mine: Capabilities, watch: Watch) -> Capabilities:
    """What every rank's package can do: the lowest tier of all, with its reason; the same on every rank."""
    told = {"tier": int(mine.tier), "reason": mine.reason}
    asked = [json.loads(text) for text in watch.exchange(json.dumps(told).encode())]
    worst = min(range(len(asked)), key=lambda rank: asked[rank]["tier"])
    return replace(mine, tier=Tier(asked[worst]["tier"]), reason=_of_rank(worst, asked[worst]["reason"], len(asked)))


def _of_rank(rank: int, reason: str, ranks: int) -> str:
    return reason if ranks == 1 else f"rank {rank}: {reason}"


def fallen_back(chosen: Chosen, drafted: Draft, device: torch.device, load: LoadConfig, reason: str, world: World) -> Chosen:
    """What to go on with after fastsafetensors has failed with ``reason``; logs it."""
    decision = replace(
        chosen.decision, method=SCRATCH, level=logging.WARNING, degraded_reason=reason, reasons=(*chosen.decision.reasons, reason)
    )
    return _told(Chosen(scratch(drafted, device, load), decision, drafted.plan, chosen.tier), world)
