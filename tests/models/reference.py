"""Small random models of transformers, saved as checkpoints: the oracle of the families' tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

#: Odd, so that padding matters, and below 2 * 64, so that at three ranks the last one holds padding alone.
VOCAB = 101

#: Sizes that two and three ranks can share.  Positions are few, so that short sequences reach beyond them.
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}

#: The same without what encoders do not have.
SMALL_ENCODER = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}


def randomise(model: torch.nn.Module, seed: int = 0) -> None:
    """Gives every parameter values that matter: biases away from 0, norms away from 1, and logits that spread."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            vector = parameter.dim() == 1
            parameter.copy_(1 + 0.3 * noise if vector and (parameter == 1).all() else noise * (0.3 if vector else 0.15))


def make(
    model_class: type[PreTrainedModel], config: Any, folder: Path, *, dtype: torch.dtype = torch.float32, **how: Any
) -> PreTrainedModel:
    """A random model, saved in ``folder`` with safetensors; ``how`` goes to ``save_pretrained``."""
    model = model_class(config).eval()
    randomise(model)
    model = model.to(dtype)
    model.save_pretrained(folder, **how)
    return model


def token_ids(batch: int = 2, tokens: int = 24, vocab: int = VOCAB) -> torch.Tensor:
    """Token ids ``[batch, tokens]``, the lowest and the highest id among them."""
    ids = torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(1))
    ids[0, 0], ids[-1, -1] = 0, vocab - 1
    return ids


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest absolute difference of two results of one shape; ``b`` must be one that carries information."""
    assert a.shape == b.shape and b.float().std() > 0.01
    return (a.float() - b.float()).abs().max().item()


def closeness(a: torch.Tensor, b: torch.Tensor) -> float:
    """The smallest cosine between corresponding vectors of the last dimension."""
    assert a.shape == b.shape
    return torch.cosine_similarity(a.float(), b.float(), dim=-1).min().item()
