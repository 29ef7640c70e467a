"""Feed-forward blocks, split over the intermediate size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import GateNeed
from rtp_llm.layers.activation import Gate, activation
from rtp_llm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from rtp_llm.parallel.groups import TensorParallel


@dataclass(frozen=True, slots=True)
class MLPShape:
    """Sizes of a feed-forward block, over all ranks; ``act`` is the activation's name, and ``bias`` is that of every matrix."""

    hidden_size: int
    intermediate_size: int
    act: str
    bias: bool = False


class GatedMLP(KernelUser):
    """``down(act(gate(x)) * up(x))`` (Shazeer, 2020, arXiv:2002.05202); slots ``{slot}.gate``, ``.up`` and ``.down``."""

    def __init__(self, slot: str, shape: MLPShape, *, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, intermediate, bias = shape.hidden_size, shape.intermediate_size, shape.bias
        slots = (f"{slot}.gate", f"{slot}.up")
        self.gate_up = MergedColumnParallelLinear(slots, hidden, (intermediate, intermediate), bias=bias, tp=tp, dtype=dtype)
        self.down = RowParallelLinear(f"{slot}.down", intermediate, hidden, bias=bias, tp=tp, dtype=dtype)
        self.act = Gate(shape.act)
        self.dtype = dtype

    def kernel_needs(self) -> Iterator[GateNeed]:
        span = self.down.in_span
        return self.act.needs(self.dtype, span[1] - span[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.act(self.kernels, self.gate_up(x)))
        return hidden


class MLP(nn.Module):
    """``down(act(up(x)))``; slots ``{slot}.up`` and ``{slot}.down``."""

    def __init__(self, slot: str, shape: MLPShape, *, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, intermediate, bias = shape.hidden_size, shape.intermediate_size, shape.bias
        self.up = ColumnParallelLinear(f"{slot}.up", hidden, intermediate, bias=bias, tp=tp, dtype=dtype)
        self.down = RowParallelLinear(f"{slot}.down", intermediate, hidden, bias=bias, tp=tp, dtype=dtype)
        self.act = activation(shape.act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.act(self.up(x)))
        return hidden
