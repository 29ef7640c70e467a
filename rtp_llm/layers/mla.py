"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434), split over heads.

Keys and values of all heads are one *latent* vector a token, which ``kv_b`` expands, and one rotated key that the heads
share.  The latent projections are small and whole on every rank; what works on heads is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.attention import Step
from rtp_llm.layers.cache import CacheShape
from rtp_llm.layers.indexer import Indexer, IndexerShape
from rtp_llm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import RopeParameters, Rotary, apply_rotary
from rtp_llm.parallel.groups import TensorParallel

#: The norms of the latents have an epsilon of their own in every published model, whatever ``rms_norm_eps`` says.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Sizes of one attention block, over all ranks.

    ``q_lora_rank``: the width of the queries' latent; None where queries come straight from the hidden state.
    ``nope_dim``, ``rope_dim``: elements of a query or key head without and with rotation; ``value_dim``: of a value head.
    ``scale``: what scores are multiplied by before the softmax.
    ``interleaved``: rotation turns the pairs ``(2i, 2i + 1)``, not ``(i, i + rope_dim / 2)``.
    ``bias``: the latent and the output projections have biases.
    """

    hidden_size: int
    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    interleaved: bool = True
    bias: bool = False
    indexer: IndexerShape | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim


def softmax_scale(head_dim: int, rope: RopeParameters | None = None) -> float:
    """``head_dim ** -0.5``, times the square of YaRN's temperature where ``mscale_all_dim`` asks for it.

    The tables' own factor (``mscale / mscale_all_dim``) is the rotary's business; this one also reaches the elements
    that do not turn.
    """
    scale = 1 / math.sqrt(head_dim)
    if rope is None or not rope.mscale_all_dim:
        return scale
    factor = rope.factor if rope.factor is not None else rope.max_position_embeddings / rope.original_max_position_embeddings
    temperature = 1.0 if factor <= 1 else 0.1 * rope.mscale_all_dim * math.log(factor) + 1.0
    return scale * temperature * temperature


def apply_rotary_interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the pairs ``(2i, 2i + 1)`` of ``x [..., seq, dim]`` by the tables ``[seq, dim]``.

    The result has the first elements of all pairs, then the second ones: queries and keys are permuted alike, so that
    scores do not change.
    """
    half = cos.shape[-1] // 2
    cos, sin = cos[..., :half], sin[..., :half]
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class WideRotary(Rotary):
    """Tables in float32 whatever the model's dtype, so that the rotation is computed in float32."""

    def tables(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return super().tables(start, stop, dtype=torch.float32, device=device)


class Unrotated(Rotary):
    """Tables of no width, for models that turn nothing."""

    def __init__(self) -> None:
        pass

    def tables(self, start: int, stop: int, *, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``[stop - start, 0]``, twice."""
        empty = torch.empty(stop - start, 0, dtype=dtype, device=device)
        return empty, empty


class MultiHeadLatentAttention(nn.Module):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``.

    Slots: ``{slot}.q_a``, ``.q_a_norm`` and ``.q_b``, or ``.q`` without a latent of queries; ``.kv_a`` (latent and shared
    key, ``[kv_lora_rank + rope_dim, hidden]``), ``.kv_a_norm``, ``.kv_b`` (a head's key without rotation, then its value),
    ``.o``; the indexer's under ``{slot}.index``.

    The cache holds latents and shared keys side by side as the key of one head, and the indexer's keys, if any, as its
    value: the same on every rank, and a fraction of what keys and values of all heads would take.
    """

    window: None = None

    def __init__(self, slot: str, shape: MLAShape, *, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert shape.indexer is None or shape.q_lora_rank is not None, "the indexer works on the latent of queries"
        self.shape = shape
        self.layer = layer
        rank, width = shape.q_lora_rank, shape.heads * shape.head_dim
        if rank is None:
            self.q_a = self.q_a_norm = None
            self.q = ColumnParallelLinear(f"{slot}.q", shape.hidden_size, width, bias=False, tp=tp, dtype=dtype)
        else:
            self.q_a = ReplicatedLinear(f"{slot}.q_a", shape.hidden_size, rank, bias=shape.bias, dtype=dtype)
            self.q_a_norm = RMSNorm(f"{slot}.q_a_norm", rank, LATENT_NORM_EPS, dtype=dtype)
            self.q = ColumnParallelLinear(f"{slot}.q_b", rank, width, bias=False, tp=tp, dtype=dtype)
        latent = shape.kv_lora_rank
        self.kv_a = ReplicatedLinear(f"{slot}.kv_a", shape.hidden_size, latent + shape.rope_dim, bias=shape.bias, dtype=dtype)
        self.kv_a_norm = RMSNorm(f"{slot}.kv_a_norm", latent, LATENT_NORM_EPS, dtype=dtype)
        expanded = shape.heads * (shape.nope_dim + shape.value_dim)
        self.kv_b = ColumnParallelLinear(f"{slot}.kv_b", latent, expanded, bias=False, tp=tp, dtype=dtype)
        self.o = RowParallelLinear(f"{slot}.o", shape.heads * shape.value_dim, shape.hidden_size, bias=shape.bias, tp=tp, dtype=dtype)
        self.indexer = None
        if shape.indexer is not None and rank is not None:
            self.indexer = Indexer(f"{slot}.index", shape.indexer, shape.hidden_size, rank, dtype=dtype)

    @property
    def cache_shape(self) -> CacheShape:
        """What this layer keeps of each token."""
        indexer = self.shape.indexer
        return CacheShape(1, self.shape.kv_lora_rank + self.shape.rope_dim, 0 if indexer is None else indexer.head_dim)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        shape = self.shape
        source = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        q = self.q(source).unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        latent, shared = self.kv_a(x).split((shape.kv_lora_rank, shape.rope_dim), dim=-1)
        if step.rotary is not None:
            turn = apply_rotary_interleaved if shape.interleaved else apply_rotary
            shared = turn(shared, *step.rotary).to(x.dtype)
            q = torch.cat((q[..., : shape.nope_dim], turn(q[..., shape.nope_dim :], *step.rotary).to(x.dtype)), dim=-1)
        kept = torch.cat((self.kv_a_norm(latent), shared), dim=-1)[:, None]
        index_keys = kept[..., :0] if self.indexer is None else self.indexer.keys(x, step.rotary)
        if step.cache is not None:
            kept, index_keys = step.cache.update(self.layer, kept, index_keys)
        mask, causal = step.masks[self.window].tensor, step.masks[self.window].causal
        if self.indexer is not None and kept.shape[2] > self.indexer.top_k:
            mask, causal = self.indexer.select(x, source, step.rotary, index_keys), False
        k, v = self._expanded(kept)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=shape.scale)
        out: torch.Tensor = self.o(seen.transpose(1, 2).flatten(2))
        return out

    def _expanded(self, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[batch, local heads, length, head_dim]`` and values ``[..., value_dim]`` of what the cache keeps."""
        shape = self.shape
        latent, shared = kept.split((shape.kv_lora_rank, shape.rope_dim), dim=-1)
        both = self.kv_b(latent[:, 0]).unflatten(-1, (-1, shape.nope_dim + shape.value_dim)).transpose(1, 2)
        own, v = both.split((shape.nope_dim, shape.value_dim), dim=-1)
        return torch.cat((own, shared.expand(-1, own.shape[1], -1, -1)), dim=-1), v
