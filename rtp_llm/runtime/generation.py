"""Greedy generation with a KV cache: enough of a runtime to show that the weights are right."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Answer:
    """New token ids, without the token that ended them; ``finish_reason`` is ``stop`` (an end token) or ``length``."""

    ids: tuple[int, ...]
    finish_reason: str


@torch.inference_mode()
def generate(model: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()) -> Answer:
    """The most likely continuation of a prompt, token by token.

    Args:
        model: a causal model with ``new_cache(batch, max_length)`` and ``model(input_ids, cache)`` -> logits
            ``[batch, seq, vocab]``.  Under tensor parallelism every rank calls this alike, and gets the same answer.
        prompt_ids: token ids, at least one.
        max_new_tokens: the most tokens to add, at least 1.
        stop_ids: tokens that end the answer.
    """
    ids: list[int] = []
    for token in _tokens(model, prompt_ids, max_new_tokens):
        if token in stop_ids:
            return Answer(tuple(ids), "stop")
        ids.append(token)
    return Answer(tuple(ids), "length")


def _tokens(model: Any, prompt_ids: Sequence[int], count: int) -> Iterator[int]:
    device = next(model.parameters()).device
    # The last new token is never fed back, so it needs no room.
    cache = model.new_cache(1, len(prompt_ids) + count - 1)
    fed = torch.tensor([list(prompt_ids)], dtype=torch.long, device=device)
    for _ in range(count):
        token = int(model(fed, cache)[0, -1].argmax())
        yield token
        fed = torch.tensor([[token]], dtype=torch.long, device=device)
