"""Attention over pages: the interface of a back end, and the implementation in plain torch.

A *call* has the sizes of attention, the same for all layers of one kind.  A *plan* is what a back end prepares for a call once
a pass, and all these layers use.  Keys and values are in their pages before :meth:`AttentionKernels.attend` is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.kernels.needs import KernelNeed, named
from rtp_llm.kernels.paging import PAGE_SIZE, PagedRows

#: Queries whose scores are in memory at once where torch has no fused kernel.  float32 with 64 heads and 32,768 keys: half a
#: gibibyte; all queries of such a prompt would take 256.
_SINK_BLOCK = 64


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of ``heads`` query heads over ``kv_heads`` key and value heads of ``head_dim`` elements.

    ``window``: how many tokens a token sees, itself included; None for all.  Scores are multiplied by ``head_dim ** -0.5``.
    ``sinks``: the softmax of each head has one more score, a parameter; see :func:`attend_with_sinks`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    window: int | None = None
    sinks: bool = False


@dataclass(frozen=True, slots=True)
class LatentCall:
    """Latent attention (DeepSeek-V2, 2024, arXiv:2405.04434).  A key has ``latent_dim`` elements, which are also the value, and
    ``rope_dim`` rotated ones; all ``heads`` share it.  Scores are multiplied by ``scale``."""

    heads: int
    latent_dim: int
    rope_dim: int
    scale: float
    dtype: torch.dtype
    window: None = None
    sinks: Literal[False] = False


Call = AttentionCall | LatentCall


@dataclass(frozen=True, slots=True)
class AttentionNeed(KernelNeed):
    """``attention.prefill`` or ``attention.decode`` for a call."""

    call: AttentionCall

    @property
    def text(self) -> str:
        call = self.call
        window = "" if call.window is None else f", each token seeing {call.window}"
        sinks = " with sinks" if call.sinks else ""
        return f"{self.op}{sinks} of {call.heads} heads over {call.kv_heads} of {call.head_dim} {named(call.dtype)} elements{window}"


@dataclass(frozen=True, slots=True)
class LatentNeed(KernelNeed):
    """``mla.decode`` for a call: one token a row.  ``sparse``: over the tokens that an indexer selects."""

    call: LatentCall
    sparse: bool

    @property
    def text(self) -> str:
        call = self.call
        return f"{self.op} of {call.heads} heads over latents of {call.latent_dim} and {call.rope_dim} {named(call.dtype)} elements"


class Plan(Protocol):
    """What the layers of one pass share for one call."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors that :meth:`AttentionKernels.renew` writes, and kernels read."""


class AttentionKernels(Protocol):
    """Attention over pages ``[pages, PAGE_SIZE, ...]``."""

    def plan(self, call: Call, rows: PagedRows) -> Plan:
        """Prepares a pass.  Called outside of CUDA graphs."""

    def renew(self, plan: Any, call: Call, rows: PagedRows) -> None:
        """Updates the tensors of a plan of fixed rows for a later pass."""

    def attend(
        self, plan: Any, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``q [tokens, heads, head_dim]`` of all rows, in order, to ``[tokens, heads, head_dim]``; pages are ``[pages,
        PAGE_SIZE, kv_heads, head_dim]``.  ``sinks [heads]``: given if the call has sinks."""


class LatentKernels(Protocol):
    """Latent attention over pages; the up projections are absorbed into queries and outputs."""

    def plan(self, call: Call, rows: PagedRows) -> Plan:
        """As for :class:`AttentionKernels`.  A :class:`TorchPlan` of several tokens a row asks the layer to expand latents itself."""

    def renew(self, plan: Any, call: Call, rows: PagedRows) -> None:
        """As for :class:`AttentionKernels`."""

    def attend_latent(
        self, plan: Any, q_latent: torch.Tensor, q_rope: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor
    ) -> torch.Tensor:
        """``q_latent [tokens, heads, latent_dim]`` and ``q_rope [tokens, heads, rope_dim]`` to ``[tokens, heads, latent_dim]``; pages
        are ``[pages, PAGE_SIZE, latent_dim]`` and ``[pages, PAGE_SIZE, rope_dim]``."""


def attend_with_sinks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float, seen: torch.Tensor | None
) -> torch.Tensor:
    """``q [rows, heads, tokens, dim]``, ``k`` and ``v [rows, kv_heads, keys, dim]`` to ``[rows, heads, tokens, dim]``.

    ``sinks [heads]``: one more score for each query, which takes a share of the softmax and has no value (gpt-oss, 2025,
    arXiv:2508.10925, after StreamingLLM, 2023, arXiv:2309.17453).  ``seen``: ``bool [rows or 1, 1, tokens,
    keys]``; None: all keys.  Products are in the dtype of ``q``, the softmax in float32 or wider.
    """
    rows, heads, tokens, dim = q.shape
    kv_heads, wide = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    sink, turned = sinks.to(wide)[:, None, None], k.transpose(2, 3)
    out = []
    for block in (slice(start, start + _SINK_BLOCK) for start in range(0, tokens, _SINK_BLOCK)):
        # Heads that share a key become queries of one head, so no key is repeated.
        shared = q[:, :, block].reshape(rows, kv_heads, -1, dim)
        scores = (shared @ turned).to(wide).mul_(scale).view(rows, heads, -1, k.shape[2])
        if seen is not None:
            scores.masked_fill_(~seen[:, :, block], float("-inf"))
        most = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
        weights = scores.sub_(most).exp_()
        weights /= weights.sum(dim=-1, keepdim=True) + (sink - most).exp_()
        out.append((weights.to(v.dtype).view(rows, kv_heads, -1, v.shape[2]) @ v).view(rows, heads, -1, v.shape[3]))
    return torch.cat(out, dim=2)


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """``index [rows, keys]``: the places of each row's tokens, in order.  After a row's last token it repeats the place of the
    first one, so unused places, which may hold NaN, are never read.

    ``mask [rows, 1, tokens, keys]``: which keys a query sees; None where ``causal`` says it, or all are seen.
    """

    index: torch.Tensor
    mask: torch.Tensor | None
    causal: bool
    scale: float

    def tensors(self) -> Iterator[torch.Tensor]:
        yield self.index
        if self.mask is not None:
            yield self.mask

    def gather(self, pages: torch.Tensor) -> torch.Tensor:
        """``pages [pages, PAGE_SIZE, ...]`` to each row's tokens, ``[rows, keys, ...]``."""
        # index_select copies a token's values as one; indexing by a matrix goes element by element.
        return pages.flatten(0, 1).index_select(0, self.index.flatten()).view(*self.index.shape, *pages.shape[2:])

    def sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """``q [tokens, heads, dim]``, ``k`` and ``v [rows, keys, kv_heads, dim]`` to ``[tokens, heads, dim of v]``."""
        rows, kv_heads = len(self.index), k.shape[2]
        q, k, v = q.reshape(rows, -1, *q.shape[1:]).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if sinks is not None:
            assert not self.causal, "a plan of a call with sinks has a mask"
            return attend_with_sinks(q, k, v, sinks, self.scale, self.mask).transpose(1, 2).flatten(0, 1)
        if self.causal:
            # Causal kernels need no mask and repeat no keys.
            shared = q.shape[1] != kv_heads
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared, scale=self.scale)
            return out.transpose(1, 2).flatten(0, 1)
        # Heads that share a key become queries of one head: with a mask, torch's kernels for shared heads repeat keys.
        heads, tokens = q.shape[1:3]
        group = heads // kv_heads
        mask = self.mask if self.mask is None or tokens == 1 else self.mask.repeat(1, 1, group, 1)
        q = q.reshape(rows, kv_heads, group * tokens, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return out.reshape(rows, heads, tokens, -1).transpose(1, 2).flatten(0, 1)


class TorchAttention:
    """Gathers each row's pages, then calls torch's scaled dot product attention: on every device, in every dtype."""

    def plan(self, call: Call, rows: PagedRows) -> TorchPlan:
        """Never reads pages of other rows or unused places."""
        window, host = call.window, rows.host
        position = torch.arange(rows.keys, device=rows.tables.device)
        index = rows.tables[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        index = torch.where(position < rows.lengths[:, None], index, index[:, :1])
        scale = call.scale if isinstance(call, LatentCall) else call.head_dim**-0.5
        open_window = window is None or window >= rows.keys
        if not rows.fixed and open_window and not call.sinks and set(host.lengths) == {host.tokens}:
            return TorchPlan(index, None, host.tokens > 1, scale)
        if not rows.fixed and open_window and host.tokens == 1 and len(set(host.lengths)) == 1:
            return TorchPlan(index, None, False, scale)
        query = rows.positions[..., None]
        seen = position <= query
        if window is not None:
            seen &= position > query - window
        return TorchPlan(index, seen[:, None], False, scale)

    def renew(self, plan: TorchPlan, call: Call, rows: PagedRows) -> None:
        """Writes index and mask again."""
        later = self.plan(call, rows)
        assert plan.mask is not None and later.mask is not None, "a plan of rows that are not fixed"
        plan.index.copy_(later.index)
        plan.mask.copy_(later.mask)

    def attend(
        self, plan: TorchPlan, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        return plan.sdpa(q, plan.gather(k_pages), plan.gather(v_pages), sinks)

    def attend_latent(
        self, plan: TorchPlan, q_latent: torch.Tensor, q_rope: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor
    ) -> torch.Tensor:
        latent = plan.gather(latent_pages)
        keys = torch.cat((latent, plan.gather(rope_pages)), dim=-1)
        return plan.sdpa(torch.cat((q_latent, q_rope), dim=-1), keys[:, :, None], latent[:, :, None])


#: The attention of layers to which no other is bound.
TORCH_ATTENTION = TorchAttention()


class AttentionUser(nn.Module):
    """A layer that attends over pages; ``attention`` is torch's until another back end is bound."""

    attention: Any = TORCH_ATTENTION
