"""Checkpoints of full size that take no room: real headers, a real index, and files truncated to their real length."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint.dtypes import bits_of

#: Name -> (safetensors dtype, shape).
Tensors = Mapping[str, tuple[str, tuple[int, ...]]]


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * bits_of(dtype) // 8


def write_sparse_file(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> int:
    """One safetensors file of full length whose data is a hole; returns the bytes of its tensors."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + position)
    return position


def write_sparse_checkpoint(directory: Path, tensors: Tensors, shards: int, config: dict[str, Any]) -> None:
    """``config.json``, ``shards`` files of about equal bytes in the tensors' order, and the index that names them.

    One shard is written as ``model.safetensors`` without an index, as transformers does.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        write_sparse_file(directory / "model.safetensors", tensors)
        return
    total = sum(nbytes(*t) for t in tensors.values())
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{} for _ in range(shards)]
    done = 0
    for name, (dtype, shape) in tensors.items():
        groups[min(done * shards // total, shards - 1)][name] = (dtype, shape)
        done += nbytes(dtype, shape)
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        assert group, "more shards than tensors to fill them"
        file = f"model-{i:05d}-of-{shards:05d}.safetensors"
        write_sparse_file(directory / file, group)
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


LLAMA_3_70B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}

DEEPSEEK_V3_CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}


def llama_3_70b() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of Meta-Llama-3-70B as published (bf16, 723 tensors; 30 shards)."""
    c = LLAMA_3_70B_CONFIG
    hidden, ffn, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.mlp.down_proj.weight": (hidden, ffn),
            f"{layer}.mlp.gate_proj.weight": (ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (ffn, hidden),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.q_proj.weight": (hidden, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (c["vocab_size"], hidden)}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def _fp8(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """An FP8 matrix and its scale for each block of 128 x 128."""
    yield f"{name}.weight", ("F8_E4M3", (rows, columns))
    yield f"{name}.weight_scale_inv", ("F32", (-(-rows // 128), -(-columns // 128)))


def _mlp(name: str, hidden: int, ffn: int) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    yield from _fp8(f"{name}.gate_proj", ffn, hidden)
    yield from _fp8(f"{name}.up_proj", ffn, hidden)
    yield from _fp8(f"{name}.down_proj", hidden, ffn)


def _deepseek_v3_layer(i: int) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    c = DEEPSEEK_V3_CONFIG
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
    yield from _fp8(f"{attn}.q_a_proj", c["q_lora_rank"], hidden)
    yield f"{attn}.q_a_layernorm.weight", ("BF16", (c["q_lora_rank"],))
    yield from _fp8(f"{attn}.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
    yield from _fp8(f"{attn}.kv_a_proj_with_mqa", c["kv_lora_rank"] + rope, hidden)
    yield f"{attn}.kv_a_layernorm.weight", ("BF16", (c["kv_lora_rank"],))
    yield from _fp8(f"{attn}.kv_b_proj", heads * (nope + value), c["kv_lora_rank"])
    yield from _fp8(f"{attn}.o_proj", hidden, heads * value)
    yield f"{layer}.input_layernorm.weight", ("BF16", (hidden,))
    yield f"{layer}.post_attention_layernorm.weight", ("BF16", (hidden,))
    if i < c["first_k_dense_replace"]:
        yield from _mlp(f"{layer}.mlp", hidden, c["intermediate_size"])
        return
    yield f"{layer}.mlp.gate.weight", ("BF16", (c["n_routed_experts"], hidden))
    yield f"{layer}.mlp.gate.e_score_correction_bias", ("F32", (c["n_routed_experts"],))
    yield from _mlp(f"{layer}.mlp.shared_experts", hidden, c["moe_intermediate_size"])
    for e in range(c["n_routed_experts"]):
        yield from _mlp(f"{layer}.mlp.experts.{e}", hidden, c["moe_intermediate_size"])


def deepseek_v3() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of DeepSeek-V3 with its MTP layer (FP8 blocks; about 91,000 tensors; 163 shards)."""
    c = DEEPSEEK_V3_CONFIG
    hidden, vocab, mtp = c["hidden_size"], c["vocab_size"], c["num_hidden_layers"]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (vocab, hidden))}
    for i in range(mtp + c["num_nextn_predict_layers"]):
        tensors |= dict(_deepseek_v3_layer(i))
    layer = f"model.layers.{mtp}"
    tensors |= {
        "model.norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (vocab, hidden)),
        f"{layer}.enorm.weight": ("BF16", (hidden,)),
        f"{layer}.hnorm.weight": ("BF16", (hidden,)),
        f"{layer}.eh_proj.weight": ("BF16", (hidden, 2 * hidden)),
        f"{layer}.embed_tokens.weight": ("BF16", (vocab, hidden)),
        f"{layer}.shared_head.norm.weight": ("BF16", (hidden,)),
        f"{layer}.shared_head.head.weight": ("BF16", (vocab, hidden)),
    }
    return tensors
