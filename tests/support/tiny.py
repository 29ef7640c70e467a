"""A small random Llama as transformers saves it, for tests that need real files and a real model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save_tiny_llama(directory: Path, *, dtype: torch.dtype = torch.float32, shard: str = "5GB", seed: int = 0, **overrides: Any) -> Path:
    """Writes a random LlamaForCausalLM: 2 layers, hidden 48, 6 heads, 2 KV heads, vocabulary 131 unless overridden.

    ``shard`` is transformers' ``max_shard_size``; ``20KB`` makes about ten files.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 131,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **overrides})).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    return directory
