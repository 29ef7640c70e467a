"""``load_model``: plan, agree, move bytes once, report."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rtp_llm.checkpoint import Catalog
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.config.faults import ConfigFault
from rtp_llm.errors import ConfigError, Problem, TransportError, internal
from rtp_llm.layers.cache import CacheSize
from rtp_llm.loader.cache_room import check_cache
from rtp_llm.loader.choose import Chosen, choose, fallen_back, reader_team
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.draft import Draft, draft, hands
from rtp_llm.loader.finish import finish
from rtp_llm.loader.kernels import KernelSetup, plan_kernels
from rtp_llm.loader.memory import PeakMeter
from rtp_llm.loader.placement import allocate
from rtp_llm.loader.report import LoadReport
from rtp_llm.loader.sameness import content_lines
from rtp_llm.loader.stages import MakingPlacement
from rtp_llm.loader.verify import verify
from rtp_llm.models.family import Family
from rtp_llm.parallel.watch import Watch
from rtp_llm.parallel.world import World, agree, join_world
from rtp_llm.plan.plan import LoadPlan, digest
from rtp_llm.plan.room import room_for
from rtp_llm.transport.fastsafetensors.failure import FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.probe import Tier
from rtp_llm.transport.faults import TransportFault
from rtp_llm.transport.interface import Moved, Progress, Quiet
from rtp_llm.transport.policy import SCRATCH
from rtp_llm.transport.scratch.team import Team

_log = logging.getLogger("rtp_llm.loader")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model whose every parameter is in place on its device, and what is known of how it got there."""

    model: nn.Module
    plan: LoadPlan
    report: LoadReport
    catalog: Catalog
    raw_config: Mapping[str, Any]
    family: Family
    device: torch.device
    world: World

    @property
    def directory(self) -> str:
        """The checkpoint's directory."""
        return self.catalog.directory


# Whatever mode the caller is in: an inference tensor could not be written by the reader threads, which have a mode of their own.
@torch.inference_mode(False)
def load_model(
    path: str | os.PathLike[str],
    device: str | None = None,
    parallel: ParallelConfig | None = None,
    load: LoadConfig | None = None,
    *,
    progress: Progress | None = None,
    world: World | None = None,
    cache: Callable[[], CacheSize | None] | None = None,
) -> LoadedModel:
    """Loads one rank of a checkpoint.

    Args:
        path: a checkpoint directory in Hugging Face's layout.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; the setting ``device`` unless given.
        parallel: this process's place.  Left out under ``torchrun``, all its processes form one tensor-parallel group.
            Given where no process group runs, that rank's weights are loaded and checked alone, without a forward pass.
        load: settings; from the environment unless given.
        progress: told about bytes as they arrive.
        world: the processes to meet; found from torchrun's variables unless given.
        cache: asked first, where all ranks learn of its errors: the KV cache for which there has to be room beside the weights.

    Returns:
        The model: ``model(input_ids)`` gives logits ``[batch, seq, vocab]`` for causal models, the last hidden state
        ``[batch, seq, hidden]`` for encoders.

    Raises:
        RtpLlmError: a subclass for whatever is wrong; nothing half-loaded is returned.  With several ranks, all of them
            raise the first rank's error.
    """
    load = load or LoadConfig.from_environment(os.environ)
    named = device or load.device
    met = world is None and not dist.is_initialized()  # starting the group is a meeting
    if world is None:
        world = join_world(os.environ, "cpu" if named == "cpu" else resolve_device(named, 0).type, load.timeout_s)
    clock = _Clock()
    with world.watch(together=met) as watch:  # around everything at which one rank may fail alone
        target = resolve_device(named, world.local_rank)
        if target.type == "cuda":
            torch.cuda.set_device(target)  # NCCL takes the current device
        parallel = place_of(world, parallel)
        size = None if cache is None else cache()
        with reader_team(target, load) as team:
            return _load(path, target, parallel, load, progress or Quiet(), world, watch, clock, size, team)


def _load(
    path: str | os.PathLike[str],
    device: torch.device,
    parallel: ParallelConfig,
    load: LoadConfig,
    progress: Progress,
    world: World,
    watch: Watch,
    clock: _Clock,
    cache: CacheSize | None,
    team: Team[Moved] | None,
) -> LoadedModel:
    with clock.phase("plan"):
        drafted = draft(path, parallel, load, world.groups(parallel, watch), device.type)
        plan = drafted.plan
        plan.raise_for_problems()
        kernels = plan_kernels(drafted.model, getattr(torch, drafted.dtype), load.kernels, device)
    with clock.phase("agree"):
        content = tuple(content_lines(drafted.catalog, drafted.raw_config)) if world.size > 1 else ()
        said = (*content, *kernels.lines())
        agree(watch, digest(iter((plan.digest, *said))), lambda: chain(plan.agreement_lines(), said))
    with clock.phase("choose"):
        chosen = choose(drafted, device, load, world, watch, team)
        if cache is not None:
            check_cache(cache, drafted.model, chosen.plan, device, watch)
    setup = KernelSetup(kernels, world.rank == 0)
    with PeakMeter(device) as meter:
        chosen, moved = _move(drafted, chosen, device, load, progress, world, watch, clock)
        with clock.phase("finish"):
            finish(drafted.model, chosen.plan)
    plan, decision = chosen.plan, chosen.decision
    verified = None
    if load.verify:
        with clock.phase("verify"):
            verified = verify(drafted.model, plan, drafted.catalog.directory)
    with clock.phase("compile"):
        failed = setup.wait(watch.check)
    with clock.phase("close"):
        bound = setup.bind(drafted.model, watch.exchange(failed))
    report = LoadReport(
        plan=plan,
        device=str(device),
        load_method=decision.method,
        requested_mode=load.load_method,
        effective_mode=decision.method,
        degraded_reason=decision.degraded_reason,
        reasons=decision.reasons,
        tier=None if chosen.tier is None else chosen.tier.name.lower(),
        stacked_moe_mode=load.stacked_moe_mode,
        bytes_read=moved.bytes_read,
        bytes_copied=moved.bytes_copied,
        bytes_placed=moved.bytes_placed,
        slow_path_weights=moved.slow_path,
        measured_peak_bytes=meter.peak_bytes,
        phases=clock.seconds,
        verified=verified,
        kernels=bound,
    )
    return LoadedModel(drafted.model.eval(), plan, report, drafted.catalog, drafted.raw_config, drafted.family, device, world)


def _move(
    drafted: Draft, chosen: Chosen, device: torch.device, load: LoadConfig, progress: Progress, world: World, watch: Watch, clock: _Clock
) -> tuple[Chosen, Moved]:
    """Fills the parameters, by another transport if the chosen one turns out not to work; returns which it was."""
    with clock.phase("allocate"):
        params = allocate(drafted.model, drafted.plan, device)
    with clock.phase("transport"):
        reason = ""
        try:
            moved = _deliver(chosen, params, device, load, progress, watch)
        except FastsafetensorsFailure as failure:
            reason = str(failure)
        if reason:
            # Parameters keep their memory, all of which is written again; everything else that the attempt held is let go
            # of first, frames of its traceback and cycles among threads and generators included.
            gc.collect()
            chosen = fallen_back(chosen, drafted, device, load, reason, world)
            moved = _deliver(chosen, params, device, load, progress, watch)
    if moved.slow_path and chosen.decision.method != SCRATCH:
        _log.warning("slow path: %d of %d weights were fetched one by one", moved.slow_path, len(drafted.plan.deliveries))
    check_placed(moved, drafted.plan)
    return chosen, moved


def check_placed(moved: Moved, plan: LoadPlan) -> None:
    """Refuses a model of which a transport has placed more or less than was planned.

    Raises:
        TransportError: ``INTERNAL``.
    """
    if moved.bytes_placed != plan.bytes_read:
        what = "the transport did not place the bytes that were planned"
        raise TransportError(internal(TransportFault.INTERNAL, what, expected=plan.bytes_read, actual=moved.bytes_placed))


def _deliver(
    chosen: Chosen, params: dict[str, nn.Parameter], device: torch.device, load: LoadConfig, progress: Progress, watch: Watch
) -> Moved:
    # A load in chunks has one thread; the own reader, which also fetches what whole files lack, has several.
    in_chunks = chosen.decision.method != SCRATCH and chosen.tier is Tier.BOUNDED
    room = None if in_chunks else room_for(chosen.plan, hands(load, device.type)).parts
    progress.start(chosen.plan.bytes_read)
    try:
        moved = chosen.transport.deliver(chosen.plan, MakingPlacement(params, chosen.plan, room), progress, watch.check)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    finally:
        progress.stop()
    return moved


def place_of(world: World, parallel: ParallelConfig | None) -> ParallelConfig:
    """This process's place: as given, or, under a launcher, its rank in one tensor-parallel group of all processes.

    Raises:
        ConfigError: where a place was given that the launcher contradicts.
    """
    if world.size == 1:
        return parallel or ParallelConfig()
    if parallel is None:
        return ParallelConfig(tp_size=world.size, tp_rank=world.rank)
    rank = parallel.ep_rank * parallel.tp_size + parallel.tp_rank
    if (parallel.tp_size * parallel.ep_size, rank) != (world.size, world.rank):
        raise ConfigError(
            Problem(
                ConfigFault.CONTRADICTION,
                "the parallel sizes are not those of the launch",
                rank=world.rank,
                expected=f"tp_size * ep_size = {world.size} and rank {world.rank}",
                actual=f"{parallel.tp_size} * {parallel.ep_size} and rank {rank}",
                fix="start as many processes as tp_size * ep_size",
            )
        )
    return parallel


class _Clock:
    """Seconds by phase, in the order in which they were entered."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
