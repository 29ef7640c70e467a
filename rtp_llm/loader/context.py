"""The context of a load, resolved once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.config.faults import ConfigFault
from rtp_llm.config.load import StackedMode
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.loader.device import resolve_device
from rtp_llm.parallel.watch import Watch
from rtp_llm.parallel.world import World, join_world
from rtp_llm.plan.budget import ReaderLimits
from rtp_llm.transport.interface import NoProgress, Progress

#: Reader threads beyond this only wait for the interpreter's lock: on an H200 with 16 cores, 12 threads move 46 GB/s of
#: cached files, 16 threads 41 and 8 threads 40.
_MOST_READERS = 12
#: Bytes of float32 in one step of a transform.  CPU: a core's cache, since larger steps take up to three times as long.  GPU: enough
#: that launches do not count.
_STEP_BYTES = {"cpu": 2 << 20, "cuda": 64 << 20}


class Clock:
    """Seconds by phase, in the order in which they were entered."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class LoadContext:
    """One rank's load: source, target, settings, and the other ranks.  Every step takes it; nothing is resolved again.

    ``device`` has no number where only headers are read.
    """

    directory: str
    settings: LoadConfig
    parallel: ParallelConfig
    device: torch.device
    reader: ReaderLimits
    world: World
    watch: Watch
    progress: Progress
    clock: Clock = field(default_factory=Clock, repr=False)

    @property
    def mode(self) -> StackedMode:
        """How stacked experts are delivered by fastsafetensors."""
        return StackedMode(self.settings.stacked_moe_mode)


@contextmanager
def open_context(
    path: str | os.PathLike[str],
    device: str | None,
    parallel: ParallelConfig | None,
    settings: LoadConfig,
    progress: Progress | None,
    world: World | None,
) -> Iterator[LoadContext]:
    """The context of a load, while the ranks watch each other; for the arguments see :func:`rtp_llm.loader.load.load_model`.

    Raises:
        RtpLlmError: inside or on the way, the first error of any rank.
    """
    named = device or settings.device
    met = world is None and not dist.is_initialized()  # starting the group is a meeting
    if world is None:
        world = join_world(os.environ, "cpu" if named == "cpu" else resolve_device(named, 0).type, settings.timeout_s)
    clock = Clock()
    with world.watch(together=met) as watch:
        target = resolve_device(named, world.local_rank)
        if target.type == "cuda":
            torch.cuda.set_device(target)  # NCCL takes the current device
        place, reader = place_of(world, parallel), reader_limits(settings, target.type)
        yield LoadContext(os.fspath(path), settings, place, target, reader, world, watch, progress or NoProgress(), clock)


def planning_context(
    path: str | os.PathLike[str],
    parallel: ParallelConfig | None = None,
    settings: LoadConfig | None = None,
    device: torch.device | None = None,
) -> LoadContext:
    """The context of one rank that only plans: other ranks take no part, nothing is allocated.

    ``device``: the target; by default CUDA where the settings allow it and there is some, else the CPU.
    """
    settings = settings or LoadConfig.from_environment(os.environ)
    if device is None:
        device = torch.device("cpu" if settings.device == "cpu" or not torch.cuda.is_available() else "cuda")
    world, reader = World(timeout_s=settings.timeout_s), reader_limits(settings, device.type)
    return LoadContext(os.fspath(path), settings, parallel or ParallelConfig(), device, reader, world, world.watch(), NoProgress())


def reader_limits(settings: LoadConfig, device_type: str) -> ReaderLimits:
    """The own reader's limits.  For a GPU a quarter of the CPUs is left to its driver, and parameters are derived one at a time."""
    cpus = len(os.sched_getaffinity(0))
    threads = settings.reader_threads or max(1, min(_MOST_READERS, cpus * 3 // 4 if device_type == "cuda" else cpus))
    derivers = 1 if device_type == "cuda" else threads
    return ReaderLimits(threads, settings.buffer_mib << 20, settings.read_gap_kib << 10, derivers, step_bytes(device_type))


def step_bytes(device_type: str) -> int:
    """Working memory for deriving parameters of one tensor."""
    return _STEP_BYTES["cpu" if device_type == "cpu" else "cuda"]


def place_of(world: World, parallel: ParallelConfig | None) -> ParallelConfig:
    """This process's place: as given, or, under a launcher, its rank in one tensor-parallel group of all processes.

    Raises:
        ConfigError: the given place contradicts the launcher.
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
