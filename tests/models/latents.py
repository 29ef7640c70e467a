"""The variants with latent attention that are held against transformers: every option that changes what is computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    PreTrainedModel,
)

from tests.models.reference import VOCAB, randomise

FAMILIES = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "deepseek_v32": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "kimi_linear": (KimiLinearConfig, KimiLinearForCausalLM),
}

#: Sizes that two and four ranks can share.  No two sizes that could be mistaken for each other are equal.
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
PLAIN = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7}

#: YaRN as DeepSeek writes it, over sixteen original positions, so that test sequences of 24 reach beyond them.
YARN = {
    "max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}
NO_LATENT_OF_QUERIES = {"q_lora_rank": None}
#: Enough heads that no two tokens score alike, and fewer tokens than the test sequences have; with nine of them no query's
#: choice hangs on the last bits, which differ between numbers of ranks.
INDEX = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 9}
KIMI = {"linear_head_dim": 12, "linear_num_heads": 4, "linear_conv_kernel_dim": 4, "max_position_embeddings": 64}
HYBRID = ["linear_attention", "full_attention"]

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("deepseek_v2", {**PLAIN, "first_k_dense_replace": 1, "n_shared_experts": 2}),
    "v2-groups": ("deepseek_v2", {**GROUPED, "topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    "v2-lite": ("deepseek_v2", {**PLAIN, **NO_LATENT_OF_QUERIES, "first_k_dense_replace": 1, **YARN}),
    "v2-biases": ("deepseek_v2", {**PLAIN, "first_k_dense_replace": 3, "attention_bias": True, "tie_word_embeddings": True}),
    "v3": ("deepseek_v3", {**GROUPED, "first_k_dense_replace": 1}),
    "v3-yarn": ("deepseek_v3", {**GROUPED, "first_k_dense_replace": 1, **YARN}),
    "v3-halves": ("deepseek_v3", {**GROUPED, "first_k_dense_replace": 0, "rope_interleave": False}),
    "v3-no-latent": ("deepseek_v3", {**GROUPED, "first_k_dense_replace": 1, **NO_LATENT_OF_QUERIES, "norm_topk_prob": False}),
    "v3-kimi-k2": ("deepseek_v3", {**PLAIN, "first_k_dense_replace": 1, "attention_bias": True, "tie_word_embeddings": True}),
    "v32": ("deepseek_v32", {**GROUPED, **INDEX, "first_k_dense_replace": 1}),
    "v32-yarn": ("deepseek_v32", {**GROUPED, **INDEX, "mlp_layer_types": ["sparse", "dense", "sparse"], **YARN}),
    "v32-sees-all": ("deepseek_v32", {**GROUPED, **INDEX, "first_k_dense_replace": 1, "index_topk": 64}),
    "glm-lite": ("glm4_moe_lite", {**PLAIN}),
    "glm-lite-types": ("glm4_moe_lite", {**GROUPED, **NO_LATENT_OF_QUERIES, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "kimi-linear": (
        "kimi_linear",
        {**PLAIN, **NO_LATENT_OF_QUERIES, **KIMI, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    ),
    "kimi-linear-groups": (
        "kimi_linear",
        {**GROUPED, **KIMI, "layer_types": ["full_attention", "linear_attention", "full_attention"], "attention_bias": True},
    ),
}


def configured(variant: str) -> tuple[type[PreTrainedModel], Any]:
    """The model class and configuration of a variant, small."""
    family, options = VARIANTS[variant]
    config_class, model_class = FAMILIES[family]
    fields = {**SMALL, **options}
    if family == "kimi_linear":
        fields["num_local_experts"] = fields.pop("n_routed_experts")
    return model_class, config_class(**fields)


def save(variant: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model, saved in ``folder`` as transformers saves it, which is the published spelling.

    Correction biases are random too, since transformers starts with zeros.  In another dtype than float32 it is read again,
    as transformers then keeps in float32 what has to be; older releases round Kimi's biases.
    """
    model_class, config = configured(variant)
    model = model_class(config).eval()
    randomise(model)
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    if dtype == torch.float32:
        return model
    model = model_class.from_pretrained(folder, dtype=dtype).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.float()
    model.save_pretrained(folder)
    return model


def save_as_held(model: PreTrainedModel, saved: Path, folder: Path) -> None:
    """The same model under the names that it has in transformers' memory: experts stacked, and so on."""
    folder.mkdir()
    tied = model.config.tie_word_embeddings
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in one file."""
    return load_file(folder / "model.safetensors")


def restore(folder: Path, tensors: dict[str, torch.Tensor], **fields: Any) -> None:
    """Puts other tensors, and other fields of config.json, in place; a field that is ``...`` is taken out."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))
