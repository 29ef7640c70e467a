"""Pools hidden states to one vector for each sequence, in the modes of sentence-transformers' pooling layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.layers.faults import LayerFault

Pooling = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _cls(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    first = mask.argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), first]


def _last(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def _mean(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1)


def _max(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden.masked_fill(mask[..., None] == 0, torch.finfo(hidden.dtype).min).amax(1)


POOLINGS: Mapping[str, Pooling] = MappingProxyType({"cls": _cls, "lasttoken": _last, "max": _max, "mean": _mean})


def pool(hidden: torch.Tensor, attention_mask: torch.Tensor | None = None, mode: str = "mean") -> torch.Tensor:
    """``hidden [batch, seq, hidden]`` and ``attention_mask [batch, seq]`` (1 for real tokens; None: all are) to ``[batch, hidden]``.

    Raises:
        ConfigError: ``UNKNOWN_POOLING``, with the modes that are known.
    """
    if mode not in POOLINGS:
        raise ConfigError(
            Problem(LayerFault.UNKNOWN_POOLING, "no such way of pooling", expected=f"one of {', '.join(POOLINGS)}", actual=repr(mode))
        )
    mask = torch.ones(hidden.shape[:2], device=hidden.device) if attention_mask is None else attention_mask
    return POOLINGS[mode](hidden, mask.to(torch.int64))
