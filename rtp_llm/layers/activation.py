"""Activation functions by the names that Hugging Face configurations use (``hidden_act``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
from torch.nn import functional as F

from rtp_llm.errors import ConfigError, Problem
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
