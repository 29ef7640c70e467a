"""The operations that layers call, and how a layer declares which ones it calls.

A layer that calls one derives from :class:`KernelUser`, calls ``self.kernels.<op>`` and declares it in ``kernel_needs``.
The back end is chosen once, for the whole model, before weights are read (:mod:`rtp_llm.kernels.choose`), and bound to the
modules (:mod:`rtp_llm.kernels.bind`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import nn

from rtp_llm.kernels.needs import KernelNeed
from rtp_llm.kernels.torch_kernels import TORCH, RotaryTables


class Kernels(Protocol):
    """Operations on plain tensors of one device and dtype.  Only ``add_rms_norm`` writes to its arguments."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x [..., n]`` and ``weight [n]`` to ``[..., n]`` (Zhang and Sennrich, 2019, arXiv:1910.07467); the mean is float32."""

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``x`` and ``residual [..., n]`` to ``(rms_norm(x + residual), x + residual)``.

        Consumes both arguments: results may be in their memory, so no other tensor may share it, and they must not be read again.
        """

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gate_up [..., 2 n]`` to ``silu(first half) * second half``, ``[..., n]`` (Shazeer, 2020, arXiv:2002.05202)."""

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """``cos`` and ``sin [tokens, rot]``, each with the same ``rot / 2`` columns twice, in the form that :meth:`rotate` takes.
        Made once a pass, for all layers.  The shapes depend on ``tokens`` alone, so CUDA graphs can copy new tables over old ones."""

    def rotate(self, q: torch.Tensor, k: torch.Tensor, tables: RotaryTables, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Turns ``q [tokens, heads, dim]`` and ``k [tokens, kv_heads, dim]`` by the tables of their positions (Su et al., 2021,
        arXiv:2104.09864).

        The first ``rot <= dim`` elements of a head are turned, the others pass: the pairs ``(i, i + rot / 2)``, or, where
        ``interleaved``, ``(2 i, 2 i + 1)``.  The order of turned elements in an interleaved result depends on the back
        end.  It is the same for queries and keys, so scores do not depend on it.
        """


class KernelUser(nn.Module):
    """A module that calls kernels; ``kernels`` is torch's until others are bound."""

    kernels: Kernels = TORCH

    def kernel_needs(self) -> Iterable[KernelNeed]:
        """What this module calls: one value for each operation and set of sizes."""
        raise AssertionError(f"{type(self).__name__} declares no needs")


def kernel_needs(model: nn.Module) -> tuple[KernelNeed, ...]:
    """The needs of all modules of ``model``, each once, in module order.  Reads no weights: the model may be on the meta device."""
    return tuple(dict.fromkeys(_needs(model)))


def _needs(model: nn.Module) -> Iterator[KernelNeed]:
    for module in model.modules():
        if isinstance(module, KernelUser):
            yield from module.kernel_needs()
