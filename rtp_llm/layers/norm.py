"""Normalisation layers, whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import NormNeed
from rtp_llm.layers.base import Planned
from rtp_llm.plan.pieces import Fill, Piece


class RMSNorm(Planned, KernelUser):
    """Root mean square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467) over the last dimension.

    The mean is taken in float32.  Parameter: ``weight [size]``.
    """

    weight: nn.Parameter

    def __init__(self, slot: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.eps = eps
        self.declare("weight", (size,), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        return {"weight": (Piece.full(f"{self.slot}.weight", tuple(self.weight.shape)),)}

    def kernel_needs(self) -> Iterator[NormNeed]:
        yield NormNeed("rms_norm", self.weight.dtype, self.weight.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; the caller declares ``add_need``."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    @property
    def add_need(self) -> NormNeed:
        """The need of :meth:`add`."""
        return NormNeed("add_rms_norm", self.weight.dtype, self.weight.shape[0])


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
