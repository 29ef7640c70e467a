"""Quantised checkpoints and what they mean, written by references of ours in float64.

A :class:`Format` quantises one matrix and says what the codes stand for; :func:`make` does that to a random model of
transformers, and leaves the model itself with the weights that the codes stand for: the oracle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rtp_llm.layers.quantised import Quantisable
from rtp_llm.loader import LoadedModel
from tests.models.reference import VOCAB, randomise

Tensors = dict[str, torch.Tensor]
#: A matrix ``[out, in]`` to its tensors, and to the float32 matrix that they stand for.
Encode = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

#: Sizes that two ranks share in whole groups of 32 and that make blocks of 128 partial: 320 and 192 are no multiples of it.
DENSE = {
    "vocab_size": VOCAB,
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE = {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 192, "norm_topk_prob": True}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, lambda: LlamaConfig(**DENSE)),
    "phi3": (Phi3ForCausalLM, lambda: Phi3Config(**DENSE, pad_token_id=0)),
    "qwen3_moe": (Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**MOE)),
}
#: The rows of the matrices that phi3's checkpoints hold as one.
FUSED = {
    "qkv_proj": {"q": (0, 192), "k": (192, 256), "v": (256, 320)},
    "gate_up_proj": {"gate": (0, 320), "up": (320, 640)},
}

#: What checkpoints leave plain.
PLAIN = ("lm_head", "embed_tokens", "norm", "mlp.gate.")


@dataclass(frozen=True)
class Format:
    """``config`` is the declaration; ``oracle`` says whose word it is what the tensors mean."""

    config: dict[str, Any]
    encode: Encode
    oracle: str = "a reference of ours in float64"


def quantised(name: str) -> bool:
    """Whether a tensor of a plain checkpoint is a weight that formats here quantise."""
    return name.endswith(".weight") and not any(part in name for part in PLAIN)


def make(
    form: Format, model: str, folder: Path, *, encode: Encode | None = None, change: Callable[[Tensors], None] | None = None
) -> PreTrainedModel:
    """Writes a quantised checkpoint and returns the model that it stands for, in float32.

    ``encode`` replaces the format's own; ``change`` may spoil the tensors before they are written.
    """
    model_class, config = MODELS[model]
    plain = model_class(config()).eval()
    randomise(plain)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(8)  # routers far apart, so that rounding does not change the choice
            elif parameter.dim() == 2 and not name.endswith("embed_tokens.weight"):
                parameter.mul_(0.5)  # wider layers than other tests': logits of the same size
    plain.save_pretrained(folder)
    return quantise(folder, model_class, form, encode=encode, change=change)


def quantise(
    folder: Path,
    model_class: type[PreTrainedModel],
    form: Format,
    *,
    encode: Encode | None = None,
    change: Callable[[Tensors], None] | None = None,
) -> PreTrainedModel:
    """The same to a plain checkpoint in one file."""
    tensors, dense = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not quantised(name):
            tensors[name] = dense[name] = tensor
            continue
        encoded, dense[name] = (encode or form.encode)(tensor)
        tensors |= {f"{name.removesuffix('weight')}{key}": value.contiguous() for key, value in encoded.items()}
    save_file({name: tensor.contiguous() for name, tensor in dense.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    oracle = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    declare(folder, quantization_config=form.config)
    return oracle


def declare(folder: Path, **fields: Any) -> None:
    """Changes fields of ``config.json``; None takes one out."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def dense_weights(oracle: PreTrainedModel, folder: Path) -> Tensors:
    """The oracle's weights by the names that checkpoints have."""
    oracle.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def part_of(tensors: Tensors, name: str, slot: str) -> torch.Tensor:
    """The matrix of ``slot`` in the tensor ``name``: all of it, or its rows where the tensor holds several."""
    parts = FUSED.get(name.split(".")[-2])
    return tensors[name] if parts is None else tensors[name][slice(*parts[slot.rpartition(".")[2]])]


def check_weights(loaded: LoadedModel, wanted: Tensors, names: dict[str, str] | None = None) -> int:
    """Compares every quantised matrix of a rank with its part of the oracle's; returns how many there were.

    ``names``: the oracle's names of slots where they are not the checkpoint's.
    """
    stored = {slot: (names or {}).get(slot) or source.raw for slot, source in loaded.plan.slots.items()}
    raw = {slot.rpartition(".")[0]: name.rpartition(".")[0] for slot, name in stored.items()}
    compared = 0
    for layer in loaded.model.modules():
        if not isinstance(layer, Quantisable):
            continue
        for attribute, held in layer.held.items():
            for i, matrix in enumerate(held.matrices):
                found = held.scheme.dequantise(layer.tensors(attribute, i), matrix)
                whole = part_of(wanted, f"{raw[matrix.slot]}.weight", matrix.slot)
                assert torch.equal(found, whole[slice(*matrix.rows), slice(*matrix.columns)]), matrix
                compared += 1
    return compared


def digest(folder: Path) -> str:
    """A hash of a checkpoint's one file."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def blocks(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest magnitude of each block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    return padded.unflatten(0, (-1, block[0])).unflatten(2, (-1, block[1])).amax((1, 3))


def over_blocks(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """A block scale in float64 for every element."""
    wide = scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def fp8_blocks(scale_dtype: torch.dtype, block: tuple[int, int] = (128, 128)) -> Encode:
    """DeepSeek-V3's; with ``float8_e8m0fnu`` the scales are powers of two, rounded up."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = blocks(weight, block) / 448
        if scale_dtype == torch.float8_e8m0fnu:
            scale = torch.exp2(torch.ceil(torch.log2(scale)))
        scale = scale.to(scale_dtype)
        codes = (weight.double() / over_blocks(scale.float(), block, weight.shape)).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale}, (codes.double() * over_blocks(scale.float(), block, weight.shape)).float()

    return encode


def fp8_tensor(*, static: bool, shape: tuple[int, ...] = ()) -> Encode:
    """AutoFP8's and ModelOpt's: one float32 number for the tensor."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = weight.abs().amax() / 448
        codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale.reshape(shape)}
        if static:
            tensors["input_scale"] = torch.tensor(0.03).reshape(shape)
        return tensors, (codes.double() * scale.double()).float()

    return encode


def pack(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned codes into int32 along the last dimension, the lowest bits first, or in ``order``."""
    per = 32 // bits
    words = codes.long().unflatten(-1, (-1, per))[..., list(order or range(per))]
    packed = (words << (torch.arange(per) * bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _affine(weight: torch.Tensor, bits: int, group: int, index: torch.Tensor, *, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes ``[out, in]``, zero points and float16 scales ``[out, groups]`` for columns that belong to groups by ``index``."""
    count = weight.shape[1] // group
    scale, zero = torch.empty(len(weight), count, dtype=torch.float16), torch.full((len(weight), count), 2 ** (bits - 1))
    for g in range(count):
        part = weight[:, index == g]
        if symmetric:
            scale[:, g] = (part.abs().amax(1) / (2 ** (bits - 1) - 1)).half()
        else:
            least, most = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale[:, g] = ((most - least) / (2**bits - 1)).half()
            # From 1 on: files of GPTQ's first version store one less, and readers differ for 0.
            zero[:, g] = (-least / scale[:, g].float()).round().clamp(1, 2**bits - 1).long()
    wide_scale, wide_zero = scale.double()[:, index], zero.double()[:, index]
    codes = ((weight.double() / wide_scale).round() + wide_zero).clamp(0, 2**bits - 1)
    return codes, zero, scale, ((codes - wide_zero) * wide_scale).float()


def gptq(bits: int = 4, group: int = 32, *, symmetric: bool = False, second: bool = False, ordered: bool = False) -> Encode:
    """AutoGPTQ's tensors; ``second``: version 2, which stores zero points as they are."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        index = torch.arange(weight.shape[1]) // group
        if ordered:
            index = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(3))]
        codes, zero, scale, dense = _affine(weight, bits, group, index, symmetric=symmetric)
        # Symmetric files store what they like; readers must not look.
        stored = torch.full_like(zero, 3) if symmetric else zero if second else zero - 1
        tensors = {
            "qweight": pack(codes, bits).t(),
            "qzeros": pack(stored.t(), bits),
            "scales": scale.t(),
            "g_idx": index.int(),
        }
        return tensors, dense

    return encode


def awq(group: int = 32) -> Encode:
    """AutoAWQ's GEMM layout: nibble ``i`` of a word holds row ``(0, 2, 4, 6, 1, 3, 5, 7)[i]``."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        index = torch.arange(weight.shape[1]) // group
        codes, zero, scale, dense = _affine(weight, 4, group, index, symmetric=False)
        return {"qweight": pack(codes.t(), 4, order), "qzeros": pack(zero.t(), 4, order), "scales": scale.t()}, dense

    return encode


#: E2M1 by code.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def nvfp4_modelopt(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """ModelOpt's NVFP4: the second scale multiplies."""
    second = (weight.abs().amax() / (6 * 448)).float()
    groups = weight.double().unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / second.double()).float().clamp(max=448).to(torch.float8_e4m3fn)
    step = (scale.double() * second.double())[..., None]
    codes = (groups / step.clamp(min=1e-30))[..., None].sub(E2M1).abs().argmin(-1).flatten(1)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    dense = (E2M1[codes].unflatten(1, (-1, 16)) * step).flatten(1).float()
    return {"weight": packed, "weight_scale": scale, "weight_scale_2": second, "input_scale": torch.tensor(0.01)}, dense


def _fp8_config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", **fields}


def _gptq_config(**fields: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
    return {**base, **fields}


_MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head", "*.mlp.gate"]}

#: What needs no format's own library; :mod:`tests.quantization.compressed` has the others too.
FORMATS: Mapping[str, Format] = {
    "fp8-block": Format(_fp8_config(weight_block_size=[128, 128]), fp8_blocks(torch.float32)),
    "fp8-block-bf16": Format(_fp8_config(weight_block_size=[64, 128]), fp8_blocks(torch.bfloat16, (64, 128))),
    "fp8-block-ue8m0": Format(_fp8_config(weight_block_size=[128, 128], scale_fmt="ue8m0"), fp8_blocks(torch.float8_e8m0fnu)),
    "fp8-tensor": Format(_fp8_config(), fp8_tensor(static=False)),
    "fp8-static": Format(_fp8_config(activation_scheme="static", ignored_layers=["lm_head", "mlp.gate"]), fp8_tensor(static=True)),
    "gptq": Format(_gptq_config(), gptq()),
    "gptq-8": Format(_gptq_config(bits=8), gptq(8)),
    "gptq-sym": Format(_gptq_config(sym=True), gptq(symmetric=True)),
    "gptq-v2": Format(_gptq_config(checkpoint_format="gptq_v2"), gptq(second=True)),
    "gptq-order": Format(_gptq_config(desc_act=True), gptq(ordered=True)),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, awq()),
    "modelopt-fp8": Format({**_MODELOPT, "quant_algo": "FP8"}, fp8_tensor(static=True)),
    "modelopt-nvfp4": Format({**_MODELOPT, "quant_algo": "NVFP4"}, nvfp4_modelopt),
    "quark-fp8": Format(
        {
            "quant_method": "quark",
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            "exclude": ["lm_head", "*mlp.gate"],
        },
        fp8_tensor(static=True, shape=(1,)),
    ),
}
