"""Sentence embeddings with an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rtp_llm.layers.pooling import pool
from rtp_llm.runtime.pooling import Recipe

#: Texts in one forward pass: sentence-transformers' default.  Texts of very different lengths pad each other.
BATCH = 32


@torch.inference_mode()
def embed_texts(model: nn.Module, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, texts: Sequence[str]) -> torch.Tensor:
    """One vector for each text: float32 ``[len(texts), hidden]`` on the CPU.

    Args:
        model: an encoder, ``model(input_ids, attention_mask, token_type_ids)`` -> ``[batch, seq, hidden]``.
        tokenizer: the checkpoint's.
        recipe: how to pool; see :func:`rtp_llm.runtime.pooling.read_recipe`.
        texts: at least one; what does not fit ``max_tokens`` is cut off.
    """
    device = next(model.parameters()).device
    remaining = iter(texts)
    vectors = []
    while batch := [_prepared(recipe, text) for text in islice(remaining, BATCH)]:
        encoded = tokenizer(batch, padding=True, truncation=True, max_length=max_tokens(model, tokenizer, recipe), return_tensors="pt")
        ids, mask = encoded["input_ids"].to(device), encoded["attention_mask"].to(device)
        types = encoded.get("token_type_ids")
        hidden = model(ids, mask, None if types is None else types.to(device))
        # float32: sums over many tokens lose digits in half precision.
        vectors.append(pool(hidden.float(), mask, recipe.mode))
    joined = torch.cat(vectors)
    return (nn.functional.normalize(joined, dim=-1) if recipe.normalize else joined).cpu()


def _prepared(recipe: Recipe, text: str) -> str:
    text = recipe.prompt + text
    return text.lower() if recipe.lower_case else text


def max_tokens(model: Any, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> int:
    """The most tokens of one text: the recipe's, or the tokenizer's, and no more than the model has positions."""
    wanted = recipe.max_seq_length or tokenizer.model_max_length
    padding = model.embed.padding_id
    # RoBERTa's positions begin after the padding token's id.
    return int(min(wanted, model.embed.position.rows - (0 if padding is None else padding + 1)))


def cosines(vectors: torch.Tensor) -> torch.Tensor:
    """``[n, hidden]`` to the cosine of each pair, ``[n, n]``."""
    unit = nn.functional.normalize(vectors, dim=-1)
    return unit @ unit.T
