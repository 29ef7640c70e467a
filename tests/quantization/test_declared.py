"""Declarations as published: several groups, files of their own, overrides, and the families that they belong to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from rtp_llm import LoadConfig, build_plan, export_checkpoint, load_model
from rtp_llm.quantization.faults import QuantizationError
from tests.models import latents
from tests.models.reference import distance, token_ids
from tests.quantization.compressed import EVERY
from tests.quantization.formats import (
    FORMATS,
    MODELS,
    Format,
    Tensors,
    declare,
    digest,
    fp8_blocks,
    fp8_tensor,
    gptq,
    make,
    nvfp4_modelopt,
    quantise,
    quantised,
)

CPU = LoadConfig(device="cpu", dtype="float32")


def mixed(folder: Path, attention: str, rest: str, config: dict[str, Any]) -> PreTrainedModel:
    """Attention by one format, everything else by another: the oracle has the weights of both."""
    model_class, model_config = MODELS["llama"]
    torch.manual_seed(0)
    model_class(model_config()).save_pretrained(folder)
    listed = [name for name in load_file(folder / "model.safetensors") if quantised(name)]
    forms = iter([EVERY[attention if "self_attn" in name else rest] for name in listed])
    return quantise(folder, model_class, Format(config, lambda weight: next(forms).encode(weight)))


def check(folder: Path, oracle: PreTrainedModel) -> dict[str, int]:
    """Logits equal the oracle's; returns how many modules have which scheme."""
    loaded = load_model(folder, load=CPU)
    with torch.inference_mode():
        assert distance(loaded.model(token_ids()), oracle(token_ids()).logits) < 1e-4
    assert loaded.plan.model.quantization is not None
    return dict(loaded.plan.model.quantization.schemes)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="compressed-tensors needs Python 3.11")
def test_every_group_counts_with_its_own_format(tmp_path: Path) -> None:
    """FP8 attention in one group, INT4 elsewhere in another, each with its format; a group that names modules goes first."""
    groups = {
        "group_0": {**EVERY["ct-w4a16"].config["config_groups"]["group_0"], "format": "pack-quantized"},
        "group_1": {
            **EVERY["ct-fp8-channel"].config["config_groups"]["group_0"],
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
        },
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": ["lm_head"]}
    oracle = mixed(tmp_path, "ct-fp8-channel", "ct-w4a16", config)
    assert check(tmp_path, oracle) == {"FP8, a scale for each row": 8, "INT4 packed, a scale for each 32 columns": 6}


def test_modelopt_in_a_file_of_its_own_and_mixed(tmp_path: Path) -> None:
    """``hf_quant_config.json`` declares as ``config.json`` does; mixed precision names the algorithm of each layer."""
    oracle = make(FORMATS["modelopt-nvfp4"], "llama", tmp_path / "one")
    declare(tmp_path / "one", quantization_config=None)
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"], "group_size": 16}}
    (tmp_path / "one" / "hf_quant_config.json").write_text(json.dumps(own))
    assert check(tmp_path / "one", oracle) == {"NVFP4, a scale for each 16 columns": 14}

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return fp8_tensor(static=True)(weight) if weight.shape[1] == 320 else nvfp4_modelopt(weight)

    layers = {f"model.layers.{i}.mlp.down_proj": {"quant_algo": "FP8"} for i in range(2)}
    layers |= {
        f"model.layers.{i}.{name}": {"quant_algo": "NVFP4", "group_size": 16}
        for i in range(2)
        for name in ("mlp.gate_proj", "mlp.up_proj", *(f"self_attn.{one}_proj" for one in "qkvo"))
    }
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    oracle = make(Format(config, encode), "llama", tmp_path / "two")
    assert check(tmp_path / "two", oracle) == {"FP8, a scale for each tensor": 2, "NVFP4, a scale for each 16 columns": 12}


def test_gptq_overrides(tmp_path: Path) -> None:
    """``dynamic``: down projections have eight bits, and what a minus leaves out is plain."""

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return gptq(8 if weight.shape[1] == 320 else 4)(weight)

    def change(tensors: Tensors) -> None:
        name = "model.layers.0.self_attn.o_proj"
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{name}.{part}"]
        tensors[f"{name}.weight"] = torch.zeros(192, 192)

    dynamic = {r"+:.*\.down_proj": {"bits": 8}, r"-:model\.layers\.0\.self_attn\.o_proj": {}}
    make(Format(FORMATS["gptq"].config | {"dynamic": dynamic}, encode), "llama", tmp_path, change=change)
    plan = build_plan(tmp_path, load=CPU)
    assert not plan.problems and plan.model.quantization is not None
    assert dict(plan.model.quantization.schemes) == {
        "GPTQ INT4, a scale for each 32 columns": 11,
        "GPTQ INT8, a scale for each 32 columns": 2,
    }
    declare(tmp_path, quantization_config=FORMATS["gptq"].config | {"dynamic": {r"-:.*": {}}})
    with pytest.raises(QuantizationError, match="is excluded from quantisation"):
        build_plan(tmp_path, load=CPU)


@pytest.mark.parametrize("variant", ["v3", "v32", "v3-kimi-k2"])
def test_latent_attention_in_blocks(variant: str, tmp_path: Path) -> None:
    """DeepSeek's families: every projection of latent attention, the indexer's, dense layers, shared and routed experts in blocks of 16 x
    32, most of them partial; logits are the oracle's, and the export is the source."""
    model = latents.save(variant, tmp_path / "model")
    config = FORMATS["fp8-block"].config | {"weight_block_size": [16, 32]}
    oracle = quantise(tmp_path / "model", type(model), Format(config, fp8_blocks(torch.float32, (16, 32))))
    schemes = check(tmp_path / "model", oracle)
    assert list(schemes) == ["FP8, a scale for each block of 16 x 32"] and sum(schemes.values()) > 60
    loaded = load_model(tmp_path / "model", load=CPU)
    assert digest(export_checkpoint(loaded, tmp_path / "out")) == digest(tmp_path / "model")
