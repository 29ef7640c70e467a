"""Multi-head latent attention (DeepSeek-V2, 2024, arXiv:2405.04434), split over heads.

Keys and values of all heads are one *latent* vector a token, which ``kv_b`` expands, and one rotated key that the heads
share.  The latent projections are small and whole on every rank; what works on heads is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from rtp_llm.kernels.attention import AttentionUser, LatentCall, LatentNeed, TorchPlan
from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import KernelNeed, RotaryNeed
from rtp_llm.layers.attention import Paged, Step
from rtp_llm.layers.cache import CacheShape
from rtp_llm.layers.indexer import Indexer, IndexerShape
from rtp_llm.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import RopeParameters
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.parallel.shard import even

#: The epsilon of the latents' norms in every published model, whatever ``rms_norm_eps`` says.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class MLAShape:
    """Sizes of one attention block, over all ranks.

    ``q_lora_rank``: the width of the queries' latent; None if queries come from the hidden state.
    ``nope_dim``, ``rope_dim``: elements of a query or key head without and with rotation; ``value_dim``: of a value head.
    ``scale``: the factor of scores before the softmax.
    ``interleaved``: rotation turns the pairs ``(2i, 2i + 1)``, not ``(i, i + rope_dim / 2)``.
    ``rotated``: whether there is a rotation.
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
    rotated: bool = True
    bias: bool = False
    indexer: IndexerShape | None = None

    @property
    def head_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim


def softmax_scale(head_dim: int, rope: RopeParameters | None = None) -> float:
    """``head_dim ** -0.5``, times the square of YaRN's temperature where ``mscale_all_dim`` asks for it.

    The tables have their own factor (``mscale / mscale_all_dim``); this one also scales elements without rotation.
    """
    scale = 1 / math.sqrt(head_dim)
    if rope is None or not rope.mscale_all_dim:
        return scale
    factor = rope.factor if rope.factor is not None else rope.max_position_embeddings / rope.original_max_position_embeddings
    temperature = 1.0 if factor <= 1 else 0.1 * rope.mscale_all_dim * math.log(factor) + 1.0
    return scale * temperature * temperature


class MultiHeadLatentAttention(KernelUser, AttentionUser):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``.

    Slots: ``{slot}.q_a``, ``.q_a_norm`` and ``.q_b``, or ``.q`` without a latent of queries; ``.kv_a`` (latent and shared
    key, ``[kv_lora_rank + rope_dim, hidden]``), ``.kv_a_norm``, ``.kv_b`` (a head's key without rotation, then its value),
    ``.o``; the indexer's under ``{slot}.index``.

    The cache holds latents, shared keys and the indexer's keys, if any.  They are the same on every rank, and far smaller than
    keys and values of all heads.
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

        heads = even(shape.heads, tp.size, tp.rank)
        self.call = LatentCall(heads[1] - heads[0], latent, shape.rope_dim, shape.scale, dtype)

    def kernel_needs(self) -> Iterator[KernelNeed]:
        if self.shape.rotated:
            yield RotaryNeed("rotate", self.call.dtype, self.shape.rope_dim, self.shape.rope_dim, self.shape.interleaved)
        yield LatentNeed("mla.decode", self.call.dtype, self.call, self.indexer is not None)

    @property
    def cache_shape(self) -> CacheShape:
        """What this layer keeps of each token."""
        indexer = self.shape.indexer
        index = () if indexer is None else ((indexer.head_dim,),)
        return CacheShape(((self.shape.kv_lora_rank,), (self.shape.rope_dim,), *index))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        shape = self.shape
        source = x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x))
        q = self.q(source).flatten(0, 1).unflatten(-1, (-1, shape.head_dim))
        latent, shared = self.kv_a(x).flatten(0, 1).split((shape.kv_lora_rank, shape.rope_dim), dim=-1)
        if step.tables is not None:
            turned, shared = self.kernels.rotate(q[..., shape.nope_dim :], shared[:, None], step.tables, shape.interleaved)
            q, shared = torch.cat((q[..., : shape.nope_dim], turned), dim=-1), shared[:, 0]
        kept = [self.kv_a_norm(latent), shared]
        if self.indexer is not None:
            kept.append(self.indexer.keys(x, step.rotary))
        attended = self._whole(q, kept, x, source, step) if step.paged is None else self._paged(q, kept, x, source, step, step.paged)
        out: torch.Tensor = self.o(attended.flatten(1).unflatten(0, x.shape[:2]))
        return out

    def _whole(self, q: torch.Tensor, kept: list[torch.Tensor], x: torch.Tensor, source: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention among the tokens of the pass alone, ``[tokens, local heads, value_dim]``."""
        latent, shared, *index = (part.unflatten(0, x.shape[:2]) for part in kept)
        mask, causal = step.masks[self.window].tensor, step.masks[self.window].causal
        if self.indexer is not None and latent.shape[1] > self.indexer.top_k:
            mask, causal = self.indexer.select(x, source, step.rotary, index[0]), False
        q, k, v = (part.transpose(1, 2) for part in (q.unflatten(0, x.shape[:2]), *self._expanded(latent, shared)))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.shape.scale)
        return seen.transpose(1, 2).flatten(0, 1)

    def _paged(
        self, q: torch.Tensor, kept: list[torch.Tensor], x: torch.Tensor, source: torch.Tensor, step: Step, paged: Paged
    ) -> torch.Tensor:
        """Attention over the cached tokens of each row, ``[tokens, local heads, value_dim]``."""
        latent, shared, *index = paged.cache.write(self.layer, paged.rows, *kept)
        plan = paged.plans[self.call]
        if self.indexer is not None:
            # Only torch has sparse attention, so the plan is a TorchPlan.
            keys = plan.gather(index[0])
            if keys.shape[1] > self.indexer.top_k:
                plan = replace(plan, mask=self.indexer.select(x, source, step.rotary, keys, plan.mask), causal=False)
        if isinstance(plan, TorchPlan) and x.shape[1] > 1:
            # For many queries expanded keys are cheaper: they are narrower than latents.
            return plan.sdpa(q, *self._expanded(plan.gather(latent), plan.gather(shared)))
        return self._absorbed(plan, q, latent, shared)

    def _absorbed(self, plan: Any, q: torch.Tensor, latent: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """The same with absorbed up projections (section 2.1.2 of the paper): they are applied to queries and to the result, so
        pages are read without expanding latents."""
        shape = self.shape
        up = self.kv_b.matrix(q.dtype).unflatten(0, (q.shape[1], -1))
        up_k, up_v = up.split((shape.nope_dim, shape.value_dim), dim=1)
        q_latent = (q[..., : shape.nope_dim].transpose(0, 1) @ up_k).transpose(0, 1)
        seen = self.attention.attend_latent(plan, q_latent, q[..., shape.nope_dim :], latent, shared)
        values: torch.Tensor = seen.transpose(0, 1) @ up_v.transpose(1, 2)
        return values.transpose(0, 1)

    def _expanded(self, latent: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[batch, length, local heads, head_dim]`` and values ``[..., value_dim]`` of what is kept, ``[batch, length, ...]``."""
        shape = self.shape
        own, v = self.kv_b(latent).unflatten(-1, (-1, shape.nope_dim + shape.value_dim)).split((shape.nope_dim, shape.value_dim), dim=-1)
        return torch.cat((own, shared[:, :, None].expand(-1, -1, own.shape[2], -1)), dim=-1), v
