"""The decoder variants that are held against transformers: every option that changes what is computed."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicCache

from tests.models.reference import SMALL

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}

#: Phi-3's default padding token lies beyond the vocabulary of tests.
PHI: dict[str, Any] = {"pad_token_id": 0}

#: One factor for each of the four frequencies of a head of eight.
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 3.5, 5.0]}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Sixteen original positions, so that test sequences of 24 reach beyond them."""
    return {"max_position_embeddings": 16, "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **fields}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-multi-head": ("llama", {"num_key_value_heads": 6}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 20}),
    "llama-gelu": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("llama", rope("linear", factor=4.0)),
    "llama-dynamic": ("llama", rope("dynamic", factor=4.0)),
    "llama-yarn": ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-longrope": ("llama", rope("longrope", factor=4.0, original_max_position_embeddings=16, **FACTORS)),
    "llama-longrope-short": ("llama", rope("longrope", factor=4.0, original_max_position_embeddings=32, **FACTORS)),
    "llama-llama3": (
        "llama",
        rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=2.0, original_max_position_embeddings=16),
    ),
    "llama-proportional": ("llama", rope("proportional", partial_rotary_factor=0.5)),
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "mistral-whole": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "phi3": ("phi3", PHI),
    "phi3-multi-head-tied": ("phi3", PHI | {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "phi3-window": ("phi3", PHI | {"sliding_window": 5}),
    "phi3-longrope-partial": (
        "phi3",
        PHI
        | rope("longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.3], long_factor=[2.0, 3.5])
        | {"max_position_embeddings": 64, "original_max_position_embeddings": 16},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-late-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-layer-types": (
        "qwen3",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def configured(variant: str) -> tuple[type[PreTrainedModel], Any]:
    """The model class and configuration of a variant, small."""
    family, options = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    return model_class, config_class(**{**SMALL, **options})


def reference_steps(model: PreTrainedModel, ids: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """transformers' logits, computed in steps of so many tokens with its cache."""
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        return torch.cat([model(part, cache=cache, use_cache=True).logits for part in ids.split(steps, dim=1)], dim=1)
