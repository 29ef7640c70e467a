"""The operations in plain torch: on every device, in every dtype, and the reference for all other back ends."""

from __future__ import annotations

import torch
from torch.nn import functional as F

#: Two tensors; what they hold depends on the back end.
RotaryTables = tuple[torch.Tensor, torch.Tensor]


class TorchKernels:
    """Rounds where transformers rounds, so that outputs are equal."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """The result is rounded to the dtype of ``x`` *before* the weight multiplies it, as the models were trained."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        return cos, sin

    def rotate(self, q: torch.Tensor, k: torch.Tensor, tables: RotaryTables, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes in the wider of the dtypes of heads and tables."""
        turn = apply_rotary_interleaved if interleaved else apply_rotary
        cos, sin = (table[:, None] for table in tables)
        return turn(q, cos, sin).to(q.dtype), turn(k, cos, sin).to(k.dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs ``(i, i + dim / 2)`` of ``x [..., head_dim]`` by tables that broadcast to ``[..., dim]``; elements beyond
    ``dim`` pass unchanged."""
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def apply_rotary_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same for the pairs ``(2i, 2i + 1)``.  The result has the first elements of all pairs, then the second ones, then the
    unchanged elements."""
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    cos, sin = cos[..., : dim // 2], sin[..., : dim // 2]
    first, second = turned[..., 0::2], turned[..., 1::2]
    parts = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*parts, rest), dim=-1) if rest.shape[-1] else torch.cat(parts, dim=-1)


#: The kernels of modules to which no others are bound.
TORCH = TorchKernels()
