"""The processes of one launch: their ranks, groups, and agreements."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count, zip_longest

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store, _world

from rtp_llm.config.parallel import ParallelConfig
from rtp_llm.errors import ConfigError, ParallelError, Problem
from rtp_llm.parallel.faults import ParallelFault
from rtp_llm.parallel.groups import Groups, groups_at
from rtp_llm.parallel.watch import CAUSE_SECONDS, Watch, broken
from rtp_llm.parallel.wire import waited_for

#: torchrun's variables that say where a process stands (torch.distributed.run).
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
#: Seconds after a time-out until every waiting thread has noticed it, on a busy machine too.
_LATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the launch; alone when ``size`` is 1.

    Small messages go through the launch's key-value store, where a wait can end at any moment.  A collective cannot be left: a
    frozen peer would keep this rank from exiting.  For tensors on the host there is :func:`host_group`; layers have groups of
    their own.  ``number`` distinguishes the worlds of a launch, and is the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout_s: float = 300.0
    number: int = 0
    sessions: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def watch(self, *, together: bool = True) -> Watch:
        """A watch over one load; every rank opens its watches in the same order.

        ``together``: all ranks have just met, so a rank that opens its watch seconds later is lost.  Otherwise a rank may come
        within the time-out: a program may do other things between two loads.
        """
        if self.size == 1:
            return Watch(HashStore(), self.rank, self.size, self.timeout_s)
        store = PrefixStore(f"rtp_llm/{self.number}/{next(self.sessions)}", _get_default_store())
        return Watch(store, self.rank, self.size, self.timeout_s, together=together)

    def groups(self, parallel: ParallelConfig, watch: Watch) -> Groups:
        """The groups for a forward pass; a rank that is loaded alone gets groups that refuse one.

        All ranks create all groups, in one order, so they must agree on the sizes.  Models of the same sizes share groups, which end
        with the default group.

        Raises:
            ParallelError: the same on every rank, where sizes differ.
        """
        if self.size == 1:
            return groups_at(parallel)
        sizes = f"tp_size {parallel.tp_size} ep_size {parallel.ep_size}"
        agree(watch, sizes, lambda: iter((sizes,)))
        everyone = dist.group.WORLD
        tensor = everyone
        if parallel.ep_size > 1:
            # Looked up in torch's list, which is cleared with the default group; a list of ours would not be.
            name = f"rtp_llm, {parallel.ep_size} times {parallel.tp_size} ranks"
            tensor = next((group for group in _world.pg_map if group.group_desc == name), None)
            if tensor is None:
                timeout = timedelta(seconds=self.timeout_s)
                each = [range(e * parallel.tp_size, (e + 1) * parallel.tp_size) for e in range(parallel.ep_size)]
                tensor = [dist.new_group(list(ranks), timeout=timeout, group_desc=name) for ranks in each][parallel.ep_rank]
        return groups_at(parallel, tensor, everyone)


@contextmanager
def meeting(world: World, watch: Watch) -> Iterator[Callable[[], None]]:
    """Around messages of a group: raises the error that broke a connection, of whichever rank."""
    try:
        yield watch.check
    except RuntimeError as error:
        raise ParallelError(watch.first_error(CAUSE_SECONDS) or broken(world.rank, world.size, str(error))) from error


@contextmanager
def host_group(world: World, watch: Watch) -> Iterator[dist.ProcessGroup]:
    """A gloo group over all ranks, for tensors on the host, while the context is open.

    All ranks have just met; they enter and leave together.  Each use has a new group: in an old one, a message that a failure left
    behind would be taken for the next one.

    Raises:
        ParallelError: where it cannot be created, and with the first error of any rank.
    """
    timeout = timedelta(seconds=world.timeout_s)
    with meeting(world, watch) as check:
        group = waited_for(lambda: dist.new_group(backend="gloo", timeout=timeout), check)
    try:
        yield group
        # The first rank to leave closes connections from which others may still read.
        watch.exchange(b"done")
    # An interrupt too.
    except BaseException:
        # Freeing a group waits for its messages under way, which without peers end only with the time-out.
        keeper = threading.Timer(world.timeout_s + _LATE_SECONDS, _let_go, [group])
        keeper.daemon = True
        keeper.start()
        raise
    finally:
        dist.destroy_process_group(group)


def _let_go(group: dist.ProcessGroup) -> None:
    """Does nothing: the argument was the last reference."""


def join_world(environment: Mapping[str, str], device_type: str, timeout_s: float) -> World:
    """Joins the processes that ``torchrun`` started, or stands alone where its variables are absent.

    Uses NCCL for CUDA tensors where each local process has its own GPU; gloo otherwise, and for the CPU.  A process group that
    the caller has initialised is kept.

    Raises:
        ConfigError: where the launcher's variables are incomplete or not numbers.
        ParallelError: other ranks cannot be reached within ``timeout_s`` seconds.
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
    rank = dist.get_rank()
    # A counter for each rank in the launch's store: ranks join worlds in the same order, and the store ends with the launch.
    number = _get_default_store().add(f"rtp_llm/worlds/{rank}", 1)
    return World(rank, dist.get_world_size(), where["LOCAL_RANK"], timeout_s, number)


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


def agree(
    watch: Watch,
    digest: str,
    lines: Callable[[], Iterator[str]],
    *,
    what: str = "its plan is not that of rank 0",
    fix: str = "give every rank the same checkpoint, settings and packages",
) -> None:
    """Makes sure that ``lines()`` are the same on every rank; by default those of its plan.

    ``digest``: their hash.  Lines are sent only where digests differ, to name the first difference.  ``what`` and ``fix`` are the
    problem's.

    Raises:
        ParallelError: the same on every rank, naming the first rank that differs from rank 0, and where.
    """
    digests = watch.exchange(digest.encode())
    other = next((rank for rank, d in enumerate(digests) if d != digests[0]), None)
    if other is None:
        return
    texts = watch.exchange("\n".join(lines()).encode() if watch.rank in (0, other) else b"")
    first, second = texts[0].decode().splitlines(), texts[other].decode().splitlines()
    ours, theirs = next(((a, b) for a, b in zip_longest(first, second, fillvalue="nothing") if a != b), ("?", "?"))
    raise ParallelError(
        Problem(
            ParallelFault.RANKS_DISAGREE,
            f"{what}; the first difference is shown",
            rank=other,
            expected=ours,
            actual=theirs,
            fix=fix,
        )
    )
