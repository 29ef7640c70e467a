"""Experts that stand in one tensor, scales and all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, ParallelConfig, build_plan, export_checkpoint, load_model
from rtp_llm.errors import RtpLlmError
from rtp_llm.plan.views import expert_table
from tests.models.reference import distance, token_ids
from tests.quantization.formats import FORMATS, Tensors, check_weights, declare, dense_weights, digest, fp8_blocks, make

CPU = LoadConfig(device="cpu", dtype="float32")


def stack(tensors: Tensors) -> Tensors:
    """What transformers holds in memory: gate above up, a scale for each block of both."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for at in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        for suffix, tensor in (("", "weight"), ("_scale_inv", "weight_scale_inv")):
            parts = [{one: tensors[f"{at}.experts.{e}.{one}_proj.{tensor}"] for one in ("gate", "up", "down")} for e in range(4)]
            both = [torch.cat((part["gate"].view(torch.uint8), part["up"].view(torch.uint8))) for part in parts]
            stacked[f"{at}.experts.gate_up_proj{suffix}"] = torch.stack(both).view(parts[0]["gate"].dtype)
            stacked[f"{at}.experts.down_proj{suffix}"] = torch.stack([part["down"].view(torch.uint8) for part in parts]).view(
                parts[0]["down"].dtype
            )
    return stacked


def stacked_checkpoint(folder: Path, block: int) -> tuple[Tensors, torch.Tensor]:
    """The oracle's weights by the names of single experts, and its logits."""
    encode = fp8_blocks(torch.float32, (block, block))
    oracle = make(FORMATS["fp8-block"], "qwen3_moe", folder, encode=encode)
    declare(folder, quantization_config=FORMATS["fp8-block"].config | {"weight_block_size": [block, block]})
    save_file(stack(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    with torch.inference_mode():
        return dense_weights(oracle, folder.with_name("oracle")), oracle(token_ids()).logits


def test_scales_follow_their_experts(tmp_path: Path) -> None:
    """Blocks of 64 rows do not cross from gate to up: weights and logits are the oracle's, whole, at TP 2 and EP 2, and the export
    is the source."""
    folder = tmp_path / "stacked"
    weights, logits = stacked_checkpoint(folder, 64)
    loaded = load_model(folder, load=CPU)
    with torch.inference_mode():
        assert distance(loaded.model(token_ids()), logits) < 1e-4
    assert digest(export_checkpoint(loaded, tmp_path / "out")) == digest(folder)
    layouts = expert_table(loaded.plan)[0]["layout"]
    assert layouts == {"down": "stacked", "gate_up": "stacked"}
    for place in (ParallelConfig(), *(ParallelConfig(2, r) for r in (0, 1)), *(ParallelConfig(ep_size=2, ep_rank=r) for r in (0, 1))):
        part = load_model(folder, parallel=place, load=CPU)
        assert check_weights(part, weights, {slot: _single(slot) for slot in part.plan.slots}) > 0


def _single(slot: str) -> str:
    """The name that one expert's tensor has where experts stand apart; nothing for other slots."""
    parts = slot.split(".")
    if parts[2:3] != ["experts"]:
        return ""
    _, number, _, expert, part, tensor = parts
    return f"model.layers.{number}.mlp.experts.{expert}.{part}_proj.{tensor}"


def test_a_block_of_two_matrices_is_refused(tmp_path: Path) -> None:
    """192 rows of gate above 192 of up, in blocks of 100: a block that stands for rows of both cannot be cut, and is not guessed at."""
    folder = tmp_path / "stacked"
    stacked_checkpoint(folder, 100)
    with pytest.raises(RtpLlmError, match="WRONG_GRID.*rows of two of them"):
        build_plan(folder, load=CPU)
