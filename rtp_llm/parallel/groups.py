"""The tensor-parallel group as layers see it: a size, a rank and two collectives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rtp_llm.errors import ParallelError, Problem
from rtp_llm.parallel.faults import ParallelFault


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
            dist.all_reduce(tensor, group=self._ready())
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ranks' tensors (equal shapes) joined along the last dimension, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._ready())
        return torch.cat(parts, dim=-1)


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that one rank's layers speak to."""

    tp: TensorParallel = TensorParallel()
