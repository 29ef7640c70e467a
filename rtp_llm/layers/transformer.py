"""The decoder layer and the causal language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from rtp_llm.kernels.attention import Call
from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import KernelNeed
from rtp_llm.kernels.paging import HostRows, PagedRows
from rtp_llm.kernels.torch_kernels import RotaryTables
from rtp_llm.layers.attention import Paged, Step, causal_mask
from rtp_llm.layers.cache import CacheShape, CacheSize, PagedCache
from rtp_llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding, check_batch, check_ids
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import Rotary


class DecoderLayer(KernelUser):
    """``x + attn(norm(x))``, then ``x + mlp(norm(x))``.

    ``attn(x, step)`` has the attributes ``window``, ``cache_shape`` and ``call``; ``mlp(x)`` keeps the shape.
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

    def kernel_needs(self) -> Iterator[KernelNeed]:
        yield self.post_attention_norm.add_need


class CausalLM(KernelUser):
    """A causal language model.  Without ``lm_head`` the head is tied to the embedding's weight."""

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
        self.norm = norm
        self.lm_head = lm_head
        self.rotary = rotary
        self._layers = tuple(layers)
        self.windows = frozenset(layer.attn.window for layer in layers)

    def kernel_needs(self) -> Iterator[KernelNeed]:
        """None: layers declare the rotation."""
        return iter(())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, logits and caches."""
        return self.embed.weight.dtype

    @property
    def cache_shapes(self) -> tuple[CacheShape, ...]:
        """What each layer caches on this rank."""
        return tuple(layer.attn.cache_shape for layer in self._layers)

    def new_cache(self, batch: int, max_length: int) -> PagedCache:
        """A cache on the model's device with ``batch`` empty sequences of up to ``max_length`` tokens."""
        cache = self.cache_of(CacheSize.equal(batch, max_length))
        for _ in range(batch):
            cache.take()
        return cache

    def cache_of(self, size: CacheSize) -> PagedCache:
        """A cache without sequences, on the model's device."""
        return PagedCache(self.cache_shapes, size, dtype=self.dtype, device=self.embed.weight.device)

    def step(self, rows: PagedRows, cache: PagedCache) -> Step:
        """What all layers share in a pass with a cache; it does not depend on activations."""
        plans = {call: backend.plan(call, rows) for call, backend in self._calls().items()}
        rotary = self.rotary.at(rows.positions, rows.host.lengths, dtype=self.dtype)
        return Step(rotary, self._tables(rotary), paged=Paged(cache, rows, plans))

    def renew(self, step: Step, host: HostRows) -> Step:
        """Updates the tensors of a step of fixed rows for a later pass."""
        assert step.paged is not None
        rows = step.paged.rows.refilled(host)
        for call, backend in self._calls().items():
            backend.renew(step.paged.plans[call], call, rows)
        later = self.rotary.at(rows.positions, host.lengths, dtype=self.dtype)
        for tables, fresh in ((step.rotary, later), (step.tables, self._tables(later))):
            for table, new in zip(tables or (), fresh or (), strict=True):
                table.copy_(new)
        return Step(step.rotary, step.tables, paged=Paged(step.paged.cache, rows, step.paged.plans))

    def _tables(self, rotary: tuple[torch.Tensor, torch.Tensor] | None) -> RotaryTables | None:
        return None if rotary is None else self.kernels.rotary_tables(*rotary)

    def _calls(self) -> dict[Call, Any]:
        """Each kind of attention in the model, with its back end."""
        return {layer.attn.call: layer.attn.attention for layer in self._layers if layer.attn.call is not None}

    def _whole(self, batch: int, tokens: int, device: torch.device) -> Step:
        """A pass without a cache."""
        tables = self.rotary.tables(0, tokens, dtype=self.dtype, device=device)
        rotary = None if tables is None else (tables[0].repeat(batch, 1), tables[1].repeat(batch, 1))
        return Step(rotary, self._tables(rotary), {window: causal_mask(tokens, window, device) for window in self.windows})

    def compute(self, input_ids: torch.Tensor, step: Step, *, last: bool = False) -> torch.Tensor:
        """Logits ``[batch, seq, vocab_size]``, or ``[batch, 1, vocab_size]`` of the ``last`` token alone.

        Waits for the device only in ``host_bound`` layers.
        """
        x: torch.Tensor = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, step)
        x = self.norm(x[:, -1:] if last else x)
        head = self.embed if self.lm_head is None else self.lm_head
        logits = head.logits(x)
        if step.paged is not None:
            step.paged.cache.settle(step.paged.rows)
        return logits

    def forward(
        self, input_ids: torch.Tensor, cache: PagedCache | None = None, cache_rows: Sequence[int] | None = None, *, last: bool = False
    ) -> torch.Tensor:
        """``input_ids [batch, seq]`` (int64) to logits ``[batch, seq, vocab_size]``, the same on all ranks.

        With a ``cache`` the ids continue the sequences in ``cache_rows``, one a row (None: all sequences), and
        are added to it.  Sequences may be of different lengths.  ``last``: logits of the last token only, ``[batch, 1, ...]``.

        Raises:
            ForwardError: ids of another form or outside the vocabulary (checked on the CPU only), or a cache of another
                batch size or without free pages.
        """
        check_batch("input_ids", input_ids)
        if not input_ids.is_cuda:
            # On CUDA the check would wait for the stream at every token.
            check_ids("input_ids", input_ids, self.embed.vocab_size)
        batch, tokens = input_ids.shape
        if cache is None:
            return self.compute(input_ids, self._whole(batch, tokens, input_ids.device), last=last)
        host = cache.begin(batch, tokens, cache_rows)
        logits = self.compute(input_ids, self.step(PagedRows.of(host, input_ids.device), cache), last=last)
        cache.advance(host)
        return logits
