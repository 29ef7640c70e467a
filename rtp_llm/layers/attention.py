"""Multi-head attention with shared key/value heads, split over heads; torch's scaled dot product does the work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.cache import CacheShape, KVCache
from rtp_llm.layers.linear import QKVParallelLinear, RowParallelLinear
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import apply_rotary
from rtp_llm.parallel.groups import TensorParallel


@dataclass(frozen=True, slots=True)
class Mask:
    """Who sees whom: a boolean ``tensor`` broadcastable to ``[batch, heads, queries, keys]`` (True: is seen), or plain
    ``causal``, for which kernels need no tensor; neither means that all see all."""

    tensor: torch.Tensor | None = None
    causal: bool = False


def causal_mask(queries: int, past: int, window: int | None, device: torch.device) -> Mask:
    """The mask of ``queries`` tokens behind ``past`` cached ones.  With a ``window`` a token sees that many tokens, itself included."""
    keys = past + queries
    if window is None or window >= keys:
        if queries == 1:
            return Mask()
        if past == 0:
            return Mask(causal=True)
    query = torch.arange(past, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    seen = key <= query
    return Mask(seen if window is None else seen & (key > query - window))


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward pass share: a mask for each window that a layer has (None: no window), the rotary
    tables ``[seq, dim]`` where the model has them, and the cache where there is one."""

    masks: Mapping[int | None, Mask]
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    cache: KVCache | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one attention block, over all ranks; ``norm_eps`` asks for RMS norms on each query and key head."""

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None


class Attention(nn.Module):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``; slots ``{slot}.q``, ``.k``, ``.v``, ``.o``, ``.q_norm``, ``.k_norm``.

    ``window``: how many tokens a token sees, itself included; None for all.  ``layer`` is the place in the KV cache.
    """

    def __init__(
        self, slot: str, shape: AttentionShape, *, layer: int, window: int | None = None, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.head_dim = shape.head_dim
        self.qkv = QKVParallelLinear(
            slot, shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim, bias=shape.qkv_bias, tp=tp, dtype=dtype
        )
        width = shape.heads * shape.head_dim
        self.o = RowParallelLinear(f"{slot}.o", width, shape.hidden_size, bias=shape.output_bias, tp=tp, dtype=dtype)
        eps = shape.norm_eps
        self.q_norm = None if eps is None else RMSNorm(f"{slot}.q_norm", shape.head_dim, eps, dtype=dtype)
        self.k_norm = None if eps is None else RMSNorm(f"{slot}.k_norm", shape.head_dim, eps, dtype=dtype)

    @property
    def cache_shape(self) -> CacheShape:
        """What this layer keeps of each token."""
        return CacheShape(self.qkv.kv_heads, self.head_dim, self.head_dim)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        heads = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x).split(self.qkv.sizes, dim=-1))
        q, k, v = heads
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step.rotary is not None:
            q, k = apply_rotary(q, *step.rotary), apply_rotary(k, *step.rotary)
        if step.cache is not None:
            k, v = step.cache.update(self.layer, k, v)
        mask = step.masks[self.window]
        shared = self.qkv.heads != self.qkv.kv_heads
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tensor, is_causal=mask.causal, enable_gqa=shared)
        out: torch.Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return out
