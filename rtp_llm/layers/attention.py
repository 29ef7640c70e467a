"""Multi-head attention with shared key/value heads, split over heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.kernels.attention import AttentionCall, AttentionNeed, AttentionUser, Call, attend_with_sinks
from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import KernelNeed, RotaryNeed
from rtp_llm.kernels.paging import PagedRows
from rtp_llm.kernels.torch_kernels import RotaryTables
from rtp_llm.layers.base import Planned
from rtp_llm.layers.cache import CacheShape, PagedCache
from rtp_llm.layers.linear import HeadShape, QKVParallelLinear, RowParallelLinear
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.parallel.shard import even
from rtp_llm.plan.pieces import Piece


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: a boolean ``tensor`` broadcastable to ``[batch, heads, queries, keys]`` (True: seen), or ``causal``,
    for which kernels need no tensor.  Without both every query sees all keys."""

    tensor: torch.Tensor | None = None
    causal: bool = False


def causal_mask(tokens: int, window: int | None, device: torch.device) -> Mask:
    """The mask of a sequence of ``tokens`` tokens.  With a ``window`` a token sees that many tokens, itself included."""
    if window is None or window >= tokens:
        return Mask(causal=tokens > 1)
    query, key = torch.arange(tokens, device=device)[:, None], torch.arange(tokens, device=device)[None]
    return Mask((key <= query) & (key > query - window))


@dataclass(frozen=True, slots=True)
class Paged:
    """A pass with a cache: its rows, and the plan of each kind of attention."""

    cache: PagedCache
    rows: PagedRows
    plans: Mapping[Call, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a forward pass share: rotary tables ``[batch * seq, dim]``, if any, and the kernels' form of them.
    With a cache ``paged``; without one a mask for each window (None: no window)."""

    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    tables: RotaryTables | None = None
    masks: Mapping[int | None, Mask] = field(default_factory=dict)
    paged: Paged | None = None


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one attention block, over all ranks; ``norm_eps`` asks for RMS norms on each query and key head.

    ``rotary_dim``: rotated elements of a head; None without rotation.  ``sinks``: each query head has a learnt score that takes
    a share of the softmax and belongs to no token.
    """

    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    norm_eps: float | None = None
    rotary_dim: int | None = None
    sinks: bool = False


class Sinks(Planned):
    """The sinks of this rank's query heads.  Parameter: ``weight [heads / tp]``, which the slot ``slot`` fills."""

    weight: nn.Parameter

    def __init__(self, slot: str, heads: int, *, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot, self.heads = slot, heads
        self.span = even(heads, tp.size, tp.rank)
        self.declare("weight", (self.span[1] - self.span[0],), dtype)

    def tiles(self) -> dict[str, tuple[Piece, ...]]:
        return {"weight": (Piece(self.slot, (self.heads,), (self.span,), ((0, self.span[1] - self.span[0]),)),)}


class Attention(KernelUser, AttentionUser):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``; slots ``{slot}.q``, ``.k``, ``.v``, ``.o``, ``.q_norm``, ``.k_norm``,
    ``.sinks``.

    ``window``: how many tokens a token sees, itself included; None for all.  ``layer`` is the place in the KV cache.
    """

    def __init__(
        self, slot: str, shape: AttentionShape, *, layer: int, window: int | None = None, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer = layer
        self.window = window
        self.head_dim = shape.head_dim
        heads = HeadShape(shape.heads, shape.kv_heads, shape.head_dim)
        self.qkv = QKVParallelLinear(slot, shape.hidden_size, heads, bias=shape.qkv_bias, tp=tp, dtype=dtype)
        width = shape.heads * shape.head_dim
        self.o = RowParallelLinear(f"{slot}.o", width, shape.hidden_size, bias=shape.output_bias, tp=tp, dtype=dtype)
        eps = shape.norm_eps
        self.q_norm = None if eps is None else RMSNorm(f"{slot}.q_norm", shape.head_dim, eps, dtype=dtype)
        self.k_norm = None if eps is None else RMSNorm(f"{slot}.k_norm", shape.head_dim, eps, dtype=dtype)
        self.sinks = Sinks(f"{slot}.sinks", shape.heads, tp=tp, dtype=dtype) if shape.sinks else None
        self.rotary_dim = shape.rotary_dim
        self.call = AttentionCall(self.qkv.heads, self.qkv.kv_heads, shape.head_dim, dtype, window, shape.sinks)

    def kernel_needs(self) -> Iterator[KernelNeed]:
        # Encoders have no rotation and no cache.
        if self.rotary_dim is not None:
            yield RotaryNeed("rotate", self.call.dtype, self.head_dim, self.rotary_dim, False)
            yield AttentionNeed("attention.prefill", self.call.dtype, self.call)
            yield AttentionNeed("attention.decode", self.call.dtype, self.call)

    @property
    def cache_shape(self) -> CacheShape:
        """A key and a value for each token and local head."""
        return CacheShape(((self.qkv.kv_heads, self.head_dim),) * 2)

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).flatten(0, 1) for part in self.qkv(x).split(self.qkv.sizes, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if step.tables is not None:
            q, k = self.kernels.rotate(q, k, step.tables, False)
        if step.paged is None:
            seen = self._whole(q, k, v, len(x), step.masks[self.window])
        else:
            k_pages, v_pages = step.paged.cache.write(self.layer, step.paged.rows, k, v)
            sinks = None if self.sinks is None else self.sinks.weight
            seen = self.attention.attend(step.paged.plans[self.call], q, k_pages, v_pages, sinks)
        out: torch.Tensor = self.o(seen.flatten(1).unflatten(0, x.shape[:2]))
        return out

    def _whole(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: int, mask: Mask) -> torch.Tensor:
        """Attention among the tokens of the pass alone."""
        shared = self.qkv.heads != self.qkv.kv_heads
        q, k, v = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in (q, k, v))
        if self.sinks is not None:
            tokens = q.shape[2]
            # A causal mask of no tensor is one for kernels; here somebody has to say it.
            shown = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril() if mask.causal else mask.tensor
            shown = None if shown is None else shown[None, None]
            return attend_with_sinks(q, k, v, self.sinks.weight, self.head_dim**-0.5, shown).transpose(1, 2).flatten(0, 1)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.tensor, is_causal=mask.causal, enable_gqa=shared)
        return seen.transpose(1, 2).flatten(0, 1)
