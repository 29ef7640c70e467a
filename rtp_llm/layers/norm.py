"""Normalisation layers, whole on every rank."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.base import Planned
from rtp_llm.plan.pieces import Fill, Piece


class RMSNorm(Planned):
    """Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) over the last dimension.

    The mean is taken in float32 and the result rounded to the input's dtype *before* the weight multiplies it, as the
    models were trained.  Parameter: ``weight [size]``.
    """

    weight: nn.Parameter

    def __init__(self, slot: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.eps = eps
        self.declare("weight", (size,), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        return {"weight": (Piece.full(f"{self.slot}.weight", tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class LayerNorm(Planned):
    """Layer normalisation (Ba et al., 2016, arXiv:1607.06450) over the last dimension.  Parameters: ``weight``, ``bias [size]``."""

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, slot: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.eps = eps
        self.declare("weight", (size,), dtype)
        self.declare("bias", (size,), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        shape = tuple(self.weight.shape)
        return {name: (Piece.full(f"{self.slot}.{name}", shape),) for name in ("weight", "bias")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, tuple(self.weight.shape), self.weight, self.bias, self.eps)
