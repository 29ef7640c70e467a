"""Feed-forward blocks, split over the intermediate size."""

from __future__ import annotations

import torch
from torch import nn

from rtp_llm.layers.activation import activation
from rtp_llm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from rtp_llm.parallel.groups import TensorParallel


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` (Shazeer, 2020, arXiv:2002.05202); slots ``{slot}.gate``, ``.up`` and ``.down``."""

    def __init__(
        self, slot: str, hidden_size: int, intermediate_size: int, act: str, *, bias: bool, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        slots, sizes = (f"{slot}.gate", f"{slot}.up"), (intermediate_size, intermediate_size)
        self.gate_up = MergedColumnParallelLinear(slots, hidden_size, sizes, bias=bias, tp=tp, dtype=dtype)
        self.down = RowParallelLinear(f"{slot}.down", intermediate_size, hidden_size, bias=bias, tp=tp, dtype=dtype)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        hidden: torch.Tensor = self.down(self.act(gate) * up)
        return hidden


class MLP(nn.Module):
    """``down(act(up(x)))``; slots ``{slot}.up`` and ``{slot}.down``."""

    def __init__(
        self, slot: str, hidden_size: int, intermediate_size: int, act: str, *, bias: bool, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(f"{slot}.up", hidden_size, intermediate_size, bias=bias, tp=tp, dtype=dtype)
        self.down = RowParallelLinear(f"{slot}.down", intermediate_size, hidden_size, bias=bias, tp=tp, dtype=dtype)
        self.act = activation(act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.act(self.up(x)))
        return hidden
