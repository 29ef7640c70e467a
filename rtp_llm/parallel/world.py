"""The processes of one launch: who they are, and the three occasions on which they meet."""

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
#: Seconds after a time-out until whoever waits has surely noticed it, on a busy machine too.
_LATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class World:
    """This process among those of the launch; alone when ``size`` is 1.

    Small messages go through the launch's key-value store, since waiting there can be ended at any moment; a collective
    cannot be left, and would keep a rank from exiting while a frozen peer holds it.  For tensors on the host there is
    :func:`host_group`; layers have groups of their own.  ``number`` tells the worlds of a launch apart, and is the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    timeout_s: float = 300.0
    number: int = 0
    sessions: Iterator[int] = field(default_factory=count, repr=False, compare=False)

    def watch(self, *, together: bool = True) -> Watch:
        """A watch over one load; every rank opens its watches in the same order.

        ``together``: all ranks have just met, so that one which opens its watch seconds later is lost.  Otherwise a rank
        may come as late as the time-out allows: what a program does between two steps is its own affair.
        """
        if self.size == 1:
            return Watch(HashStore(), self.rank, self.size, self.timeout_s)
        store = PrefixStore(f"rtp_llm/{self.number}/{next(self.sessions)}", _get_default_store())
        return Watch(store, self.rank, self.size, self.timeout_s, together=together)

    def groups(self, parallel: ParallelConfig, watch: Watch) -> Groups:
        """The groups for a forward pass, or, for a rank whose weights are loaded alone, groups that refuse one.

        With several ranks all of them make all groups, in one order, which they can only if they agree on the sizes.  Models of the
        same sizes share them, as all models share the default group, with which they end.

        Raises:
            ParallelError: the same on every rank, where they do not.
        """
        if self.size == 1:
            return groups_at(parallel)
        sizes = f"tp_size {parallel.tp_size} ep_size {parallel.ep_size}"
        agree(watch, sizes, lambda: iter((sizes,)))
        everyone = dist.group.WORLD
        tensor = everyone
        if parallel.ep_size > 1:
            # torch lists the groups of a process, and forgets them when the default group is destroyed: no list of ours could do so.
            name = f"rtp_llm, {parallel.ep_size} times {parallel.tp_size} ranks"
            tensor = next((group for group in _world.pg_map if group.group_desc == name), None)
            if tensor is None:
                timeout = timedelta(seconds=self.timeout_s)
                each = [range(e * parallel.tp_size, (e + 1) * parallel.tp_size) for e in range(parallel.ep_size)]
                tensor = [dist.new_group(list(ranks), timeout=timeout, group_desc=name) for ranks in each][parallel.ep_rank]
        return groups_at(parallel, tensor, everyone)


@contextmanager
def meeting(world: World, watch: Watch) -> Iterator[Callable[[], None]]:
    """Around messages of a group: turns a broken connection into the error that caused it, on whichever rank."""
    try:
        yield watch.check
    except RuntimeError as error:
        raise ParallelError(watch.first_error(CAUSE_SECONDS) or broken(world.rank, world.size, str(error))) from error


@contextmanager
def host_group(world: World, watch: Watch) -> Iterator[dist.ProcessGroup]:
    """A gloo group over all ranks, for tensors on the host, which lives as long as the context is open.

    All ranks enter and leave it together, and have just met when they enter.  One for each occasion: what a failure leaves under
    way in a group, a later message would be taken for.

    Raises:
        ParallelError: where it cannot be made, and with the first error of any rank.
    """
    timeout = timedelta(seconds=world.timeout_s)
    with meeting(world, watch) as check:
        group = waited_for(lambda: dist.new_group(backend="gloo", timeout=timeout), check)
    try:
        yield group
        # Whoever goes first closes connections, of which others may still be reading.
        watch.exchange(b"done")
    # Whatever it is, an interrupt too.
    except BaseException:
        # Letting go of a group waits for whatever is under way in it, and without its peers that ends with its time-out alone.
        keeper = threading.Timer(world.timeout_s + _LATE_SECONDS, _let_go, [group])
        keeper.daemon = True
        keeper.start()
        raise
    finally:
        dist.destroy_process_group(group)


def _let_go(group: dist.ProcessGroup) -> None:
    """Nothing: the caller's was the last reference."""


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
    rank = dist.get_rank()
    # Counted where the ranks meet, and apart for each: they join in the same order, and what is counted ends with the launch.
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
    """Makes sure that every rank has planned the same load, or has the same of something else.

    ``digest`` stands for ``lines()``, which are sent only where digests differ, to name the first difference.  ``what`` and ``fix``
    are those of the problem.

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
