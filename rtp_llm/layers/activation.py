"""Activation functions by the names that Hugging Face configurations use (``hidden_act``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional as F

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.kernels.interface import Kernels
from rtp_llm.kernels.needs import GateNeed
from rtp_llm.layers.faults import LayerFault

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x).square()


def _clipped_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x).clamp(-10, 10)


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


#: The tanh approximation (Hendrycks and Gimpel, 2016, arXiv:1606.08415) goes by five names, for five ways to write it.
_gelu_tanh: Activation = partial(F.gelu, approximate="tanh")

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_10": _clipped_gelu,
        "gelu_accurate": _gelu_tanh,
        "gelu_fast": _gelu_tanh,
        "gelu_new": _gelu_tanh,
        "gelu_python": F.gelu,
        "gelu_python_tanh": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "hardswish": F.hardswish,
        "leaky_relu": F.leaky_relu,
        "linear": _identity,
        "mish": F.mish,
        "quick_gelu": _quick_gelu,
        "relu": F.relu,
        "relu2": _squared_relu,
        "relu6": F.relu6,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "swish": F.silu,
        "tanh": torch.tanh,
    }
)


def activation(name: str) -> Activation:
    """The elementwise function called ``name``.

    Raises:
        ConfigError: ``UNKNOWN_ACTIVATION``, with the names that are known.
    """
    if name not in ACTIVATIONS:
        raise ConfigError(
            Problem(
                LayerFault.UNKNOWN_ACTIVATION, "no such activation function", expected=f"one of {', '.join(ACTIVATIONS)}", actual=repr(name)
            )
        )
    return ACTIVATIONS[name]


#: The names of the activation with a kernel, which includes the multiplication.
_SILU = frozenset({"silu", "swish"})


class Gate:
    """``act(first half) * second half`` of the last dimension, by a kernel if the activation has one."""

    def __init__(self, name: str) -> None:
        self._act = activation(name)
        self._silu = name in _SILU

    def needs(self, dtype: torch.dtype, size: int) -> Iterator[GateNeed]:
        """The need of a call that gives rows of ``size`` elements."""
        if self._silu:
            yield GateNeed("silu_and_mul", dtype, size)

    def __call__(self, kernels: Kernels, gate_up: torch.Tensor) -> torch.Tensor:
        """``gate_up [..., 2 n] -> [..., n]``."""
        if self._silu:
            return kernels.silu_and_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self._act(gate) * up


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """gpt-oss's gate (2025, arXiv:2508.10925) of columns that alternate, gate before up: ``(up + 1) * gate * sigmoid(alpha * gate)``,
    where ``gate`` is at most ``limit`` and ``up`` within it on both sides."""

    alpha: float
    limit: float

    def needs(self, dtype: torch.dtype, size: int) -> Iterator[GateNeed]:
        """Nothing: there is no kernel for it."""
        return iter(())

    def __call__(self, kernels: Kernels, gate_up: torch.Tensor) -> torch.Tensor:
        """``gate_up [..., 2 n] -> [..., n]``."""
        gate, up = gate_up[..., 0::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
