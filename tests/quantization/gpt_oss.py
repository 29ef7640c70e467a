"""Small checkpoints of gpt-oss with experts in MXFP4, as published; transformers says what they mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.models.reference import randomise
from tests.moe.variants import VARIANTS
from tests.quantization.formats import Tensors, declare

#: The declaration of the published checkpoints.
MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
EXPERTS = 5
#: Four blocks of 32 to an expert's inner size: up to four ranks share it.
SIZES: dict[str, Any] = {
    **VARIANTS["gpt_oss"][1],
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": EXPERTS,
}


def packed(rows: int, columns: int, generator: torch.Generator) -> Tensors:
    """Any codes, and scales of weights of some tenths."""
    groups = columns // 32
    blocks = torch.randint(256, (EXPERTS, rows, groups, 16), generator=generator).to(torch.uint8)
    return {"blocks": blocks, "scales": torch.randint(119, 124, (EXPERTS, rows, groups), generator=generator).to(torch.uint8)}


def make(folder: Path, *, change: Callable[[Tensors], object] | None = None, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> Tensors:
    """Writes a checkpoint; returns the matrices ``[out, in]`` that its experts stand for, by slot, in float32."""
    config = GptOssConfig(**{**SIZES, **sizes})
    model = GptOssForCausalLM(config)
    randomise(model)
    model.to(dtype).save_pretrained(folder)
    tensors, dense, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(5)
    hidden, inner = config.hidden_size, config.intermediate_size
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}.mlp"
        tensors[f"{at}.router.weight"] *= 8
        for part, shape in (("gate_up", (2 * inner, hidden)), ("down", (hidden, inner))):
            del tensors[f"{at}.experts.{part}_proj"]
            found = packed(*shape, generator)
            tensors |= {f"{at}.experts.{part}_proj_{name}": tensor for name, tensor in found.items()}
            whole = convert_moe_packed_tensors(found["blocks"], found["scales"], dtype=torch.float32).transpose(1, 2)
            dense |= {f"layers.{layer}.experts.{e}.{part}": matrix for e, matrix in enumerate(whole)}
    if change is not None:
        change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    declare(folder, quantization_config=MXFP4)
    return dense


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model as transformers reads it, dequantised."""
    return GptOssForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=Mxfp4Config(dequantize=True)).eval()


def published() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors of gpt-oss-120b: name, safetensors' dtype and shape."""
    experts, hidden, inner = 128, 2880, 2880
    tensors = {f"{name}.weight": ("BF16", (201088, hidden)) for name in ("model.embed_tokens", "lm_head")}
    tensors["model.norm.weight"] = ("BF16", (hidden,))
    for at in (f"model.layers.{layer}" for layer in range(36)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = ("BF16", (hidden,))
        for name, rows, columns in (("q", 4096, hidden), ("k", 512, hidden), ("v", 512, hidden), ("o", hidden, 4096)):
            tensors[f"{at}.self_attn.{name}_proj.weight"] = ("BF16", (rows, columns))
            tensors[f"{at}.self_attn.{name}_proj.bias"] = ("BF16", (rows,))
        tensors[f"{at}.self_attn.sinks"] = ("BF16", (64,))
        tensors[f"{at}.mlp.router.weight"] = ("BF16", (experts, hidden))
        tensors[f"{at}.mlp.router.bias"] = ("BF16", (experts,))
        for name, rows in (("gate_up", 2 * inner), ("down", hidden)):
            tensors[f"{at}.mlp.experts.{name}_proj_blocks"] = ("U8", (experts, rows, 90, 16))
            tensors[f"{at}.mlp.experts.{name}_proj_scales"] = ("U8", (experts, rows, 90))
            tensors[f"{at}.mlp.experts.{name}_proj_bias"] = ("BF16", (experts, rows))
    return tensors
