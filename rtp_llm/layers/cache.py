"""A static KV cache: allocated once, for a number of sequences of equal length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rtp_llm.errors import Problem
from rtp_llm.layers.faults import ForwardError, LayerFault


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer keeps of each token on this rank: ``heads`` keys of ``key_dim`` and values of ``value_dim`` elements."""

    heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of all layers, ``[batch, heads, max_length, dim]``; ``length`` tokens of them are valid.

    A forward pass writes each layer's new tokens with :meth:`update` and, when all layers are done, counts them with
    :meth:`advance`; so a pass that fails half-way leaves the cache as it was.
    """

    def __init__(
        self, layers: Iterable[CacheShape], batch: int, max_length: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        if batch < 1 or max_length < 1:
            raise ForwardError(
                Problem(
                    LayerFault.BAD_INPUT, "a cache without room", expected="batch and max_length >= 1", actual=f"{batch} and {max_length}"
                )
            )
        self.batch = batch
        self.max_length = max_length
        self.length = 0
        shapes = tuple(layers)
        self.keys = [torch.empty(batch, s.heads, max_length, s.key_dim, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.empty(batch, s.heads, max_length, s.value_dim, dtype=dtype, device=device) for s in shapes]

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def check(self, batch: int, tokens: int) -> None:
        """Refuses a batch of another size, and more tokens than there is room for.

        Raises:
            ForwardError: ``BAD_INPUT`` or ``CACHE_TOO_SMALL``.
        """
        if batch != self.batch:
            raise ForwardError(
                Problem(LayerFault.BAD_INPUT, "the cache was made for another batch", expected=str(self.batch), actual=str(batch))
            )
        if self.length + tokens > self.max_length:
            raise ForwardError(
                Problem(
                    LayerFault.CACHE_TOO_SMALL,
                    "the tokens do not fit the cache",
                    expected=f"at most {self.max_length - self.length} more tokens",
                    actual=str(tokens),
                    fix="ask new_cache for a larger max_length",
                )
            )

    def update(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts ``key`` and ``value [batch, heads, new, dim]`` behind what is there; returns all, ``[batch, heads, length + new, dim]``."""
        stop = self.length + key.shape[2]
        self.keys[layer][:, :, self.length : stop] = key
        self.values[layer][:, :, self.length : stop] = value
        return self.keys[layer][:, :, :stop], self.values[layer][:, :, :stop]

    def advance(self, tokens: int) -> None:
        """Counts ``tokens`` that every layer has written."""
        self.length += tokens

    def reset(self) -> None:
        """Forgets all tokens; the memory stays."""
        self.length = 0
