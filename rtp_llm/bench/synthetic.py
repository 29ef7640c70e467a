"""Synthetic checkpoints to measure with: valid ``config.json``, shapes of real models, random data."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

import numpy as np

#: Bytes of one element: everything is bfloat16.
_ITEM = 2
#: Elements generated and written at once.
_CHUNK = 32 << 20
#: Sign and mantissa of a bfloat16 are random; the exponent is that of 2**-7, the size of usual weights, and never NaN.
_RANDOM_BITS, _EXPONENT = 0x807F, 0x3C00
#: safetensors aligns what follows the header to 8 bytes.
_ALIGN = 8

#: Widths by size of the checkpoint, from the largest: least GB, hidden, intermediate, heads, KV heads, vocabulary.  The first
#: is Llama-3-8B's, the others keep a checkpoint of their size at a dozen layers or more.
_WIDTHS = (
    (8.0, 4096, 14336, 32, 8, 128256),
    (2.0, 2048, 8192, 32, 8, 32000),
    (0.2, 1024, 4096, 16, 8, 16000),
    (0.0, 256, 1024, 8, 4, 2000),
)
#: The same of a mixture of experts: least GB, hidden, an expert's intermediate size, experts, heads, KV heads, elements of a head,
#: vocabulary.  The first is Qwen3-30B-A3B's, but for its vocabulary.
_SPARSE_WIDTHS = (
    (4.0, 2048, 768, 128, 32, 4, 128, 32000),
    (0.0, 512, 128, 32, 8, 4, 64, 2000),
)
#: Experts of a layer in :func:`many_tensors`, three tensors each: the fewest for which layers are no more than in published
#: models.
_EXPERTS, _LAYERS = (32, 64, 128, 256), 128
#: Tensors of such a layer beside its experts: four projections, two norms of heads, two of the layer, the router.
_BESIDE = 9


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a model; ``intermediate`` is that of one expert where there are ``experts``."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    layers: int
    experts: int = 0


@dataclass(frozen=True, slots=True)
class SyntheticCheckpoint:
    """A checkpoint to write: its ``config.json``, and the shape of each tensor in the order of the files."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def nbytes(self) -> int:
        return sum(map(prod, self.shapes.values())) * _ITEM


def llama(gb: float) -> SyntheticCheckpoint:
    """A Llama of about ``gb`` times 10**9 bytes (exact to one layer; at least one layer)."""
    _, hidden, intermediate, heads, kv_heads, vocab = next(row for row in _WIDTHS if gb >= row[0])
    head = hidden // heads
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_heads * head, hidden),
        "self_attn.v_proj": (kv_heads * head, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    around = 2 * vocab * hidden + hidden
    count = max(1, round((gb * 1e9 / _ITEM - around) / sum(map(prod, layer.values()))))
    config = _config("LlamaForCausalLM", "llama", _Sizes(hidden, intermediate, heads, kv_heads, head, vocab, count))
    return SyntheticCheckpoint(config, dict(_tensors(layer, count, vocab, hidden)))


def qwen3_moe(gb: float) -> SyntheticCheckpoint:
    """A Qwen3-MoE of about ``gb`` times 10**9 bytes (exact to one layer; at least one layer), a tensor for each expert's matrix."""
    _, hidden, intermediate, experts, heads, kv_heads, head, vocab = next(row for row in _SPARSE_WIDTHS if gb >= row[0])
    sizes = _Sizes(hidden, intermediate, heads, kv_heads, head, vocab, 1, experts)
    layer = _sparse_layer(sizes)
    around = 2 * vocab * hidden + hidden
    count = max(1, round((gb * 1e9 / _ITEM - around) / sum(map(prod, layer.values()))))
    config = _sparse_config(replace(sizes, layers=count))
    return SyntheticCheckpoint(config | {"num_experts_per_tok": 8}, dict(_tensors(layer, count, vocab, hidden)))


def many_tensors(count: int, nbytes: int) -> SyntheticCheckpoint:
    """A Qwen3-MoE of about ``count`` tensors and ``nbytes`` bytes: the more tensors, the smaller each is."""
    experts = next((e for e in _EXPERTS if count <= _LAYERS * (3 * e + _BESIDE)), _EXPERTS[-1])
    layers = max(1, round(count / (3 * experts + _BESIDE)))
    elements = nbytes // _ITEM // layers
    # Attention's four matrices are squares of this width, and take an eighth of the layer.
    hidden = isqrt(elements // 32)
    hidden = hidden // 128 * 128 or max(16, hidden // 16 * 16)
    intermediate = max(1, (elements - 4 * hidden * hidden) // (3 * experts * hidden))
    heads = max(1, hidden // 128)
    sizes = _Sizes(hidden, intermediate, heads, heads, hidden // heads, 16, layers, experts)
    config, tensors = _sparse_config(sizes), _tensors(_sparse_layer(sizes), layers, sizes.vocab, hidden)
    return SyntheticCheckpoint(config | {"num_experts_per_tok": 2}, dict(tensors))


def _sparse_layer(sizes: _Sizes) -> dict[str, tuple[int, ...]]:
    hidden, intermediate, head = sizes.hidden, sizes.intermediate, sizes.head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (sizes.heads * head, hidden),
        **{f"self_attn.{x}_proj": (sizes.kv_heads * head, hidden) for x in "kv"},
        "self_attn.o_proj": (hidden, sizes.heads * head),
        **{f"self_attn.{x}_norm": (head,) for x in "qk"},
        "post_attention_layernorm": (hidden,),
        "mlp.gate": (sizes.experts, hidden),
    }
    for expert in range(sizes.experts):
        for part, shape in (("gate", (intermediate, hidden)), ("up", (intermediate, hidden)), ("down", (hidden, intermediate))):
            layer[f"mlp.experts.{expert}.{part}_proj"] = shape
    return layer


def _sparse_config(sizes: _Sizes) -> dict[str, Any]:
    return _config("Qwen3MoeForCausalLM", "qwen3_moe", replace(sizes, intermediate=sizes.hidden)) | {
        "head_dim": sizes.head,
        "num_experts": sizes.experts,
        "moe_intermediate_size": sizes.intermediate,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _config(architecture: str, model_type: str, sizes: _Sizes) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "num_hidden_layers": sizes.layers,
        "vocab_size": sizes.vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _tensors(layer: Mapping[str, tuple[int, ...]], layers: int, vocab: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (vocab, hidden)
    for number in range(layers):
        for name, shape in layer.items():
            yield f"model.layers.{number}.{name}.weight", shape
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocab, hidden)


def write_checkpoint(directory: Path, checkpoint: SyntheticCheckpoint, shards: int = 4, seed: int = 0) -> None:
    """Writes ``config.json``, ``shards`` files of about equal bytes, and their index; the same seed gives the same bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    bits = np.random.SFC64(seed)
    groups: list[dict[str, tuple[int, ...]]] = [{} for _ in range(shards)]
    done, total = 0, checkpoint.nbytes
    for name, shape in checkpoint.shapes.items():
        groups[min(done * shards // total, shards - 1)][name] = shape
        done += prod(shape) * _ITEM
    groups = [group for group in groups if group]
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_file(directory / file, group, bits)
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(checkpoint.config, indent=2), encoding="utf-8")


def _write_file(path: Path, shapes: Mapping[str, tuple[int, ...]], bits: np.random.SFC64) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + prod(shape) * _ITEM]}
        position += prod(shape) * _ITEM
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGN)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        left = position // _ITEM
        while left:
            count = min(left, _CHUNK)
            raw = bits.random_raw(-(-count // 4)).view(np.uint16)[:count]
            stream.write(((raw & _RANDOM_BITS) | _EXPONENT).data.cast("B"))
            left -= count
