"""The decoder stack and the causal language model that stands on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import Need
from rtp_llm.layers.attention import Step, causal_mask
from rtp_llm.layers.cache import KVCache
from rtp_llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding, check_batch, check_ids
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import Rotary


class DecoderLayer(KernelUser):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``.

    ``attn(x, step)`` has the attributes ``window`` and ``cache_shape``; ``mlp(x)`` is anything that keeps the shape.
    """

    def __init__(self, attn: nn.Module, mlp: nn.Module, input_norm: RMSNorm, post_attention_norm: RMSNorm) -> None:
        super().__init__()
        self.attn: Any = attn
        self.mlp = mlp
        self.input_norm = input_norm
        self.post_attention_norm = post_attention_norm

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        normed, x = self.post_attention_norm.add(self.attn(self.input_norm(x), step), x)
        hidden: torch.Tensor = x + self.mlp(normed)
        return hidden

    def kernel_needs(self) -> Iterator[Need]:
        yield self.post_attention_norm.add_need


class CausalLM(nn.Module):
    """A causal language model.  Without ``lm_head`` the head is tied: the embedding's own weight scores the tokens."""

    def __init__(
        self,
        embed: VocabParallelEmbedding,
        layers: Sequence[DecoderLayer],
        norm: nn.Module,
        lm_head: ParallelLMHead | None,
        rotary: Rotary,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.layers = nn.ModuleList(layers)
        self._cache_shapes = tuple(layer.attn.cache_shape for layer in layers)
        self.norm = norm
        self.lm_head = lm_head
        self.rotary = rotary
        self.windows = frozenset(layer.attn.window for layer in layers)

    def new_cache(self, batch: int, max_length: int) -> KVCache:
        """An empty cache for ``batch`` sequences of up to ``max_length`` tokens, on the model's device."""
        weight = self.embed.weight
        return KVCache(self._cache_shapes, batch, max_length, dtype=weight.dtype, device=weight.device)

    def hidden_states(self, input_ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """``input_ids [batch, seq]`` to the normalised last hidden state ``[batch, seq, hidden]``; arguments as for the call itself."""
        check_batch("input_ids", input_ids)
        if not input_ids.is_cuda:
            # On CUDA the look would stop the stream at every token, and cannot be captured in a graph.
            check_ids("input_ids", input_ids, self.embed.vocab_size)
        batch, tokens = input_ids.shape
        if cache is not None:
            cache.check(batch, tokens)
        past = 0 if cache is None else cache.length
        x: torch.Tensor = self.embed(input_ids)
        tables = self.rotary.tables(past, past + tokens, dtype=x.dtype, device=x.device)
        masks = {window: causal_mask(tokens, past, window, x.device) for window in self.windows}
        step = Step(masks, tables, cache)
        for layer in self.layers:
            x = layer(x, step)
        if cache is not None:
            cache.advance(tokens)
        normed: torch.Tensor = self.norm(x)
        return normed

    def forward(self, input_ids: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """``input_ids [batch, seq]`` (int64) to logits ``[batch, seq, vocab_size]``, the same on all ranks.

        With a ``cache`` the ids continue what it holds, and are added to it.

        Raises:
            ForwardError: ids of another form or outside the vocabulary (looked at on the CPU only), or a cache of another
                batch size or without room.
        """
        head = self.embed if self.lm_head is None else self.lm_head
        return head.logits(self.hidden_states(input_ids, cache))
