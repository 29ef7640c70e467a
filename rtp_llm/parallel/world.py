"""The processes of one launch: who they are, and the three occasions on which they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, zip_longest

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from rtp_llm.config.parallel import ParallelConfig
from rtp_llm.errors import ConfigError, ParallelError, Problem
from rtp_llm.parallel.faults import ParallelFault
from rtp_llm.parallel.groups import Groups, TensorParallel
from rtp_llm.parallel.watch import LOST_SECONDS, Watch
from rtp_llm.parallel.wire import all_gather_bytes

#: torchrun's variables that say where a process stands (torch.distributed.run).
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the launch; alone when ``size`` is 1.

    ``control`` is a gloo group over all ranks, for small messages; layers have groups of their own.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout_s: float = 300.0
    control: dist.ProcessGroup | None = None
    sessions: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def watch(self) -> Watch:
        """A watch over one load; every rank opens its watches in the same order."""
        if self.control is None:
            return Watch(HashStore(), self.rank, self.size, "alone")
        store = PrefixStore("rtp_llm", _get_default_store())
        return Watch(store, self.rank, self.size, f"{self.control.group_name}/{next(self.sessions)}")

    def groups(self, parallel: ParallelConfig) -> Groups:
        """The groups for a forward pass, or, for a rank whose weights are loaded alone, groups that refuse one."""
        group = dist.group.WORLD if self.size > 1 else None
        return Groups(tp=TensorParallel(parallel.tp_size, parallel.tp_rank, group))

    def exchange(self, payload: bytes, watch: Watch) -> list[bytes]:
        """Every rank's payload.  Ends with the first error of any rank, with ``ParallelError``, or after the time-out."""
        if self.size == 1:
            return [payload]
        assert self.control is not None
        with meeting(self, watch) as check:
            return all_gather_bytes(payload, self.control, check)


@contextmanager
def meeting(world: World, watch: Watch) -> Iterator[Callable[[], None]]:
    """Turns a collective's failure into the error that caused it on whichever rank."""
    try:
        yield watch.check
    except RuntimeError as error:
        problem = watch.first_error(LOST_SECONDS + 1) or Problem(
            ParallelFault.RANK_LOST,
            f"ranks could not meet: {str(error).splitlines()[0]}",
            rank=world.rank,
            expected=f"all {world.size} ranks within {world.timeout_s:g} s",
            actual="a broken connection or a time-out",
            fix="look at the output of the other ranks",
        )
        raise ParallelError(problem) from error


def join_world(environment: Mapping[str, str], device_type: str, timeout_s: float) -> World:
    """Joins the processes that ``torchrun`` started, or stands alone where its variables are absent.

    Uses NCCL for CUDA tensors where each local process has a GPU of its own, gloo otherwise and for everything on the
    CPU.  A process group that the caller has initialised is used as it is.

    Raises:
        ConfigError: where the launcher's variables are incomplete or not numbers.
        ParallelError: where the others cannot be reached within ``timeout_s`` seconds.
    """
    where = _standing(environment)
    if not dist.is_initialized():
        if where["WORLD_SIZE"] == 1:
            return World(timeout_s=timeout_s)
        own_gpu = device_type == "cuda" and where["LOCAL_WORLD_SIZE"] <= torch.cuda.device_count()
        backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
        try:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            raise ParallelError(
                Problem(
                    ParallelFault.BAD_ENVIRONMENT,
                    f"the process group could not be started: {str(error).splitlines()[0]}",
                    rank=where["RANK"],
                    expected=f"{where['WORLD_SIZE']} processes at {environment.get('MASTER_ADDR')}:{environment.get('MASTER_PORT')}",
                    actual="no connection",
                    fix="start all ranks with one torchrun command",
                )
            ) from error
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return World(dist.get_rank(), dist.get_world_size(), where["LOCAL_RANK"], timeout_s, control)


def _standing(environment: Mapping[str, str]) -> dict[str, int]:
    """torchrun's variables as numbers; one process where there are none."""
    if "WORLD_SIZE" not in environment and "RANK" not in environment:
        return {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    found = {name: environment.get(name) or environment.get(name.removeprefix("LOCAL_"), "") for name in _LAUNCHER}
    bad = [
        Problem(ParallelFault.BAD_ENVIRONMENT, f"{name} is not a number", expected="what torchrun sets", actual=repr(value))
        for name, value in found.items()
        if not value.isdecimal()
    ]
    if bad:
        raise ConfigError(bad)
    return {name: int(value) for name, value in found.items()}


def agree(world: World, watch: Watch, digest: str, lines: Callable[[], Iterator[str]]) -> None:
    """Makes sure that every rank has planned the same load.

    ``digest`` stands for ``lines()``, which are sent only where digests differ, to name the first difference.

    Raises:
        ParallelError: the same on every rank, naming the first rank that differs from rank 0, and where.
    """
    digests = world.exchange(digest.encode(), watch)
    other = next((rank for rank, d in enumerate(digests) if d != digests[0]), None)
    if other is None:
        return
    texts = world.exchange("\n".join(lines()).encode() if world.rank in (0, other) else b"", watch)
    first, second = texts[0].decode().splitlines(), texts[other].decode().splitlines()
    ours, theirs = next(((a, b) for a, b in zip_longest(first, second, fillvalue="nothing") if a != b), ("?", "?"))
    raise ParallelError(
        Problem(
            ParallelFault.RANKS_DISAGREE,
            "its plan is not that of rank 0; the first difference is shown",
            rank=other,
            expected=ours,
            actual=theirs,
            fix="give every rank the same checkpoint and the same settings",
        )
    )


def least(world: World, watch: Watch, value: int) -> int:
    """The smallest ``value`` of any rank."""
    return min(int(v) for v in world.exchange(str(value).encode(), watch))
