"""Binds the chosen back ends to a model's modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rtp_llm.kernels.attention import TORCH_ATTENTION, AttentionUser
from rtp_llm.kernels.interface import Kernels, KernelUser
from rtp_llm.kernels.torch_kernels import TORCH, RotaryTables

#: Operations of attention over pages, which layers call through their ``attention``.
ATTENTION_OPS = frozenset({"attention.prefill", "attention.decode", "mla.decode"})


class Composed:
    """Calls the chosen back end for each operation, else torch."""

    def __init__(self, by_op: Mapping[str, Kernels]) -> None:
        self._norm = by_op.get("rms_norm", TORCH)
        self._add_norm = by_op.get("add_rms_norm", TORCH)
        self._gate = by_op.get("silu_and_mul", TORCH)
        self._rotary = by_op.get("rotate", TORCH)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add_norm.add_rms_norm(x, residual, weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._gate.silu_and_mul(gate_up)

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        return self._rotary.rotary_tables(cos, sin)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, tables: RotaryTables, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rotary.rotate(q, k, tables, interleaved)


def bind(model: nn.Module, by_op: Mapping[str, Any]) -> None:
    """Binds the kernels ``by_op`` to every module of ``model`` that calls kernels.  ``by_op``: a :class:`Kernels` for each operation,
    and an ``AttentionKernels`` or ``LatentKernels`` for those of attention.  Operations that it lacks are torch's."""
    kernels = Composed(by_op)
    for module in model.modules():
        if isinstance(module, KernelUser):
            module.kernels = kernels
        if isinstance(module, AttentionUser):
            module.attention = _attention(module, by_op)


def _attention(module: AttentionUser, by_op: Mapping[str, Any]) -> Any:
    """A layer's attention back end: one for both prefill and decode, since they share pages; else torch."""
    ops = [need.op for need in module.kernel_needs() if need.op in ATTENTION_OPS] if isinstance(module, KernelUser) else []
    return by_op[ops[0]] if ops and all(op in by_op for op in ops) else TORCH_ATTENTION
