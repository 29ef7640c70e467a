"""What a layer needs of an operation: the dtype and sizes that decide whether a back end can do it.

An operation with other conditions gets its own class.  ``op`` is its name in :class:`rtp_llm.kernels.interface.Kernels`,
or in a back end's table of functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """An operation on tensors of ``dtype``."""

    op: str
    dtype: torch.dtype

    @property
    def text(self) -> str:
        """The need in a few words, for messages: ``rms_norm of 4096 bfloat16 elements``."""
        return f"{self.op} in {named(self.dtype)}"


@dataclass(frozen=True, slots=True)
class NormNeed(KernelNeed):
    """``rms_norm`` or ``add_rms_norm`` over rows of ``size`` elements."""

    size: int

    @property
    def text(self) -> str:
        return f"{self.op} of {self.size} {named(self.dtype)} elements"


@dataclass(frozen=True, slots=True)
class GateNeed(KernelNeed):
    """``silu_and_mul`` that gives rows of ``size`` elements."""

    size: int

    @property
    def text(self) -> str:
        return f"{self.op} to {self.size} {named(self.dtype)} elements"


@dataclass(frozen=True, slots=True)
class RotaryNeed(KernelNeed):
    """``rotate`` of heads of ``head_dim`` elements, of which ``rotary_dim`` turn."""

    head_dim: int
    rotary_dim: int
    interleaved: bool

    @property
    def text(self) -> str:
        return f"{self.op} of {self.rotary_dim} of {self.head_dim} {named(self.dtype)} elements a head"


def named(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")
