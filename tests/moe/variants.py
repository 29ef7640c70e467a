"""The families with experts and grouped-query attention, small, as transformers makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models.reference import SMALL, randomise

FAMILIES = {
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}

#: Seven experts divide over no number of ranks, so that remainders matter; sizes divide by two, and by 16 bytes where they
#: are cut in two.
_COMMON = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 64}
_QWEN = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
#: A clamp that some of the values reach, a window that the tests' sequences do not fit, and positions beyond YaRN's original ones.
_GPT_OSS = {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
    "intermediate_size": 24,
    "head_dim": 16,
    "swiglu_limit": 0.4,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
}
_GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {**_QWEN, "num_hidden_layers": 3, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40}),
    "qwen2_moe-normalised": (
        "qwen2_moe",
        {
            **_QWEN,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe": ("qwen3_moe", {**_QWEN, "head_dim": 16, "norm_topk_prob": True}),
    "qwen3_moe-tied-window": (
        "qwen3_moe",
        {**_QWEN, "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 7, "num_experts_per_tok": 2, "intermediate_size": 24}),
    "mixtral-window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24, "sliding_window": 5}),
    "glm4_moe": ("glm4_moe", {**_GLM, "routed_scaling_factor": 1.5, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe-groups": (
        "glm4_moe",
        {**_GLM, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "partial_rotary_factor": 1.0},
    ),
    "gpt_oss": ("gpt_oss", _GPT_OSS),
    "gpt_oss-other": (
        "gpt_oss",
        {
            **_GPT_OSS,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "swiglu_alpha": 0.9,
            "num_key_value_heads": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}


def make(variant: str, folder: Path, *, dtype: torch.dtype = torch.float32, published: bool = True, **sizes: int) -> PreTrainedModel:
    """A random model, saved in ``folder`` in the published spelling or in that which transformers has in memory (stacked);
    ``sizes`` go before the variant's own.

    Routers are drawn far apart, so that rounding does not change which experts are chosen; correction biases are not zero
    and stay float32, as transformers keeps them.
    """
    family, options = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**{**_COMMON, **options, **sizes})).eval()
    randomise(model)
    generator = torch.Generator().manual_seed(2)
    model = model.to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.mul_(8)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                bias = 0.2 * torch.randn(module.e_score_correction_bias.shape, generator=generator)
                module.e_score_correction_bias = torch.nn.Buffer(bias)
    model.save_pretrained(folder, save_original_format=published)
    return model
