"""The groups of ranks as layers see them: sizes, ranks and two collectives.

World size is ``tp_size * ep_size``; the global rank is ``ep_rank * tp_size + tp_rank``.  Attention and everything dense is
split over the ``tp_size`` ranks of one tensor-parallel group, and each of the ``ep_size`` groups holds and computes it all:
so every rank sees the same tokens.  Experts are divided between the groups, and each expert is split over the ranks of its
group.  Hence a layer of experts needs no token to be sent anywhere: each rank adds up what its shards of its experts give
for all tokens, and one all-reduce over all ranks makes the whole sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rtp_llm.config.parallel import ParallelConfig
from rtp_llm.errors import ParallelError, Problem, internal
from rtp_llm.parallel.experts import Ownership
from rtp_llm.parallel.faults import ParallelFault
from rtp_llm.parallel.watch import broken


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """``size`` ranks that hold shards of the same layers; ``group`` is None for one rank alone, or where a rank's
    weights are loaded and checked without the others (then a forward pass is refused)."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None

    def _ready(self) -> dist.ProcessGroup:
        if self.group is None:
            raise ParallelError(
                Problem(
                    ParallelFault.NO_PROCESS_GROUP,
                    "a forward pass needs all ranks of the tensor-parallel group",
                    rank=self.rank,
                    expected=f"{self.size} processes",
                    actual="this one alone",
                    fix="start with torchrun --nproc-per-node, or load with tp_size=1",
                )
            )
        return self.group

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; returns ``tensor``."""
        if self.size > 1:
            group = self._ready()
            with _together(self):
                dist.all_reduce(tensor, group=group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ranks' tensors (equal shapes) joined along the last dimension, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        group = self._ready()
        with _together(self):
            dist.all_gather(parts, tensor.contiguous(), group=group)
        return torch.cat(parts, dim=-1)


@contextmanager
def _together(tp: TensorParallel) -> Iterator[None]:
    """Around a collective: a peer that is gone is the launch's trouble, not a defect of this program.

    Raises:
        ParallelError: ``RANK_LOST``, with what the back end says.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception of its own, but it names its source file.
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            raise ParallelError(broken(tp.rank, tp.size, str(error))) from error
        raise


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """``size`` tensor-parallel groups that hold different experts, of which this rank is in number ``rank``.

    ``group`` is that of all ranks together; None as in :class:`TensorParallel`.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    ownership: Ownership = Ownership()

    def held(self, layer: int, count: int) -> tuple[tuple[int, ...], ...]:
        """For each expert-parallel rank the logical experts that it holds; see :meth:`Ownership.held`."""
        if self.ownership.ranks != self.size:
            raise ParallelError(
                internal(ParallelFault.INTERNAL, "the table of experts is for other ranks", expected=self.size, actual=self.ownership.ranks)
            )
        return self.ownership.held(layer, count)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that one rank's layers speak to."""

    tp: TensorParallel = TensorParallel()
    ep: ExpertParallel = ExpertParallel()

    @property
    def everyone(self) -> TensorParallel:
        """All ranks of both kinds: those that a layer of experts has to be summed over."""
        if self.ep.size == 1:
            return self.tp
        return TensorParallel(self.tp.size * self.ep.size, self.ep.rank * self.tp.size + self.tp.rank, self.ep.group)


def groups_at(parallel: ParallelConfig, tensor: dist.ProcessGroup | None = None, everyone: dist.ProcessGroup | None = None) -> Groups:
    """The groups of the rank at a place; without process groups they refuse collectives.  Experts are split contiguously."""
    experts = ExpertParallel(parallel.ep_size, parallel.ep_rank, everyone, Ownership(parallel.ep_size))
    return Groups(TensorParallel(parallel.tp_size, parallel.tp_rank, tensor), experts)
