"""The groups of ranks as layers see them: sizes, ranks and two collectives.

World size is ``tp_size * ep_size``; the global rank is ``ep_rank * tp_size + tp_rank``.  Attention and dense layers are split over
the ``tp_size`` ranks of a tensor-parallel group; each of the ``ep_size`` groups holds and computes all of them, so every rank sees
the same tokens.  Experts are divided between the groups, and each expert is split over the ranks of its group.  So no token is
sent: each rank sums the outputs of its experts' shards for all tokens, and one all-reduce over all ranks completes the sum.
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
    """``size`` ranks that hold shards of the same layers; ``group`` is None for one rank, or for a rank that is
    loaded and checked without the others; then a forward pass is refused."""

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
    """Around a collective: turns the back end's error for a lost peer into one of ours.

    Raises:
        ParallelError: ``RANK_LOST``, with the back end's message.
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
    """``size`` tensor-parallel groups that hold different experts; this rank is in group ``rank``.

    ``group`` holds all ranks; None as in :class:`TensorParallel`.
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
    """The groups that one rank's layers use."""

    tp: TensorParallel = TensorParallel()
    ep: ExpertParallel = ExpertParallel()

    @property
    def everyone(self) -> TensorParallel:
        """All ranks of all groups: an expert layer's output is summed over them."""
        if self.ep.size == 1:
            return self.tp
        return TensorParallel(self.tp.size * self.ep.size, self.ep.rank * self.tp.size + self.tp.rank, self.ep.group)


def groups_at(parallel: ParallelConfig, tensor: dist.ProcessGroup | None = None, everyone: dist.ProcessGroup | None = None) -> Groups:
    """The groups of the rank at a place; without process groups they refuse collectives.  Contiguous experts."""
    experts = ExpertParallel(parallel.ep_size, parallel.ep_rank, everyone, Ownership(parallel.ep_size))
    return Groups(TensorParallel(parallel.tp_size, parallel.tp_rank, tensor), experts)
