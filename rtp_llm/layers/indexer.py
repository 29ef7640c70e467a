"""The indexer of DeepSeek's sparse attention (DeepSeek-V3.2-Exp, 2025): which tokens a token attends to.

The published kernels rotate queries and keys by a Hadamard matrix and score them in FP8; the rotation keeps every dot
product, and FP8 only makes it faster, so both are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.kernels.torch_kernels import apply_rotary
from rtp_llm.layers.linear import ReplicatedLinear
from rtp_llm.layers.norm import LayerNorm

#: The epsilon of the keys' norm, which no configuration names.
KEY_NORM_EPS = 1e-6

#: Queries that are scored at once.  Scores of all heads are float32: with 64 heads, this many queries over 32,768 keys take
#: half a gibibyte, where all queries would take 256.
QUERY_BLOCK = 64

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """``heads`` queries and one key of ``head_dim`` elements, of which the first are rotated; it selects ``top_k`` tokens."""

    heads: int
    head_dim: int
    top_k: int


class Indexer(nn.Module):
    """Slots ``{slot}.q [heads * head_dim, q_lora_rank]``, ``.k [head_dim, hidden]``, ``.k_norm`` and ``.weights [heads, hidden]``.

    Every rank has the whole indexer, so all select the same tokens.  The norm of keys is float32, as published.  Rotation pairs
    ``(i, i + dim / 2)``, whatever the attention uses.
    """

    def __init__(self, slot: str, shape: IndexerShape, hidden_size: int, q_lora_rank: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.q = ReplicatedLinear(f"{slot}.q", q_lora_rank, shape.heads * shape.head_dim, bias=False, dtype=dtype)
        self.k = ReplicatedLinear(f"{slot}.k", hidden_size, shape.head_dim, bias=False, dtype=dtype)
        self.k_norm = LayerNorm(f"{slot}.k_norm", shape.head_dim, KEY_NORM_EPS, dtype=torch.float32)
        self.weights = ReplicatedLinear(f"{slot}.weights", hidden_size, shape.heads, bias=False, dtype=dtype)

    @property
    def top_k(self) -> int:
        """How many tokens a token sees at most."""
        return self.shape.top_k

    def keys(self, x: torch.Tensor, rotary: Tables | None) -> torch.Tensor:
        """``x [batch, seq, hidden] -> [batch * seq, head_dim]``: the keys that the cache keeps."""
        k = self.k_norm(self.k(x).float()).to(x.dtype).flatten(0, 1)
        return k if rotary is None else apply_rotary(k, *rotary)

    def select(
        self, x: torch.Tensor, q_latent: torch.Tensor, rotary: Tables | None, keys: torch.Tensor, seen: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The mask of the tokens that each query sees, ``bool [batch, 1, seq, length]``.

        ``keys [batch, length, head_dim]``: all keys.  ``x`` and ``q_latent``: the queries' hidden states and latents, ``[batch, seq,
        ...]``.  ``seen [batch or 1, 1, seq, length]``: keys that a query may select; None: up to its own, where the queries'
        own keys are the last ones.
        """
        q = self.q(q_latent).flatten(0, 1).unflatten(-1, (-1, self.shape.head_dim))
        if rotary is not None:
            q = apply_rotary(q, *(table[:, None] for table in rotary))
        q = q.unflatten(0, x.shape[:2]).transpose(1, 2)
        weights = self.weights(x).float().transpose(1, 2) * self.shape.heads**-0.5
        queries, length = q.shape[2], keys.shape[1]
        if seen is None:
            seen = torch.ones(1, 1, queries, length, dtype=torch.bool, device=x.device).tril(length - queries)
        scaled = keys.float().transpose(-1, -2)[:, None] * self.shape.head_dim**-0.5
        parts = (q.split(QUERY_BLOCK, dim=2), weights.split(QUERY_BLOCK, dim=2), seen[:, 0].split(QUERY_BLOCK, dim=1))
        return torch.cat([self._chosen(*block, scaled) for block in zip(*parts, strict=True)], dim=1)[:, None]

    def _chosen(self, q: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """``bool [batch, block, length]`` of one block of queries."""
        scores = (F.relu(q.float() @ keys) * weights[..., None]).sum(dim=1)
        best = scores.masked_fill(~seen, float("-inf")).topk(self.top_k, dim=-1).indices
        # topk also returns unseen tokens for a query with fewer than top_k before it.
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & seen
