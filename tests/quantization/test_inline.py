"""FP8 made while loading: codes that do not depend on the number of ranks, a peak that is predicted, and no road back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, ParallelConfig, build_plan, export_checkpoint, load_model
from rtp_llm.errors import PlanError
from rtp_llm.layers.quantised import Quantisable
from rtp_llm.loader import LoadedModel
from rtp_llm.quantization.faults import QuantizationError
from tests.models.reference import distance, token_ids
from tests.quantization.formats import FUSED, MODELS, part_of, quantised
from tests.quantization.test_ranks import plain_checkpoint
from tests.support.tiny import save_tiny_llama

GRIDS = ("tensor", "channel", "block")


def reference(weight: torch.Tensor, grid: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a whole matrix by the formula, element by element: a reference of ours."""
    largest = weight.float().abs()
    rows, columns = weight.shape
    if grid == "tensor":
        scale = (largest.amax() / 448).reshape(1)
        wide = scale.expand(rows, columns)
    elif grid == "channel":
        scale = largest.amax(1, keepdim=True) / 448
        wide = scale.expand(rows, columns)
    else:
        scale = torch.stack([torch.stack([b.amax() for b in a.split(128, 1)]) for a in largest.split(128)]) / 448
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    scale, wide = torch.where(scale == 0, 1.0, scale), torch.where(wide == 0, 1.0, wide)
    return (weight.float() / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def dequantised(name: str, weight: torch.Tensor, grid: str) -> torch.Tensor:
    """What the reference's codes stand for; matrices that the file holds as one have scales of their own."""
    if name.split(".")[-2] in FUSED:
        spans = FUSED[name.split(".")[-2]].values()
        return torch.cat([dequantised("alone.weight", weight[slice(*span)], grid) for span in spans])
    codes, scale = reference(weight, grid)
    if grid == "block":
        scale = scale.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return codes.float() * scale


def check_codes(loaded: LoadedModel, plain: dict[str, torch.Tensor], grid: str) -> int:
    """Every quantised matrix of a rank holds its part of the whole matrix's codes and scales."""
    raw = {slot: source.raw for slot, source in loaded.plan.slots.items()}
    compared = 0
    for layer in loaded.model.modules():
        if not isinstance(layer, Quantisable):
            continue
        for attribute, held in layer.held.items():
            for i, matrix in enumerate(held.matrices):
                codes, scale = reference(part_of(plain, raw[f"{matrix.slot}.weight"], matrix.slot), grid)
                found = layer.tensors(attribute, i)
                wanted = codes.view(torch.uint8)[slice(*matrix.rows), slice(*matrix.columns)]
                assert torch.equal(found["weight"].contiguous().view(torch.uint8), wanted), matrix
                spans = [dim.span(matrix) for dim in held.scheme.forms[1].dims]
                assert torch.equal(found["weight_scale"], scale[tuple(slice(*span) for span in spans)]), matrix
                compared += 1
    return compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("model", sorted(MODELS))
def test_codes_are_those_of_the_whole_matrix(model: str, grid: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Alone, at TP 2 and at EP 2 every shard is a part of the same codes, whatever the stored dtype, also when tensors arrive in
    many parts; zeros have a scale of 1; ``--verify`` makes them anew and compares; routers and heads stay plain; logits are those of
    the weights that the codes stand for."""
    plain_checkpoint(model, tmp_path, dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.layers.0.self_attn.{'qkv' if model == 'phi3' else 'q'}_proj.weight"][:130] = 0
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load = LoadConfig(device="cpu", quantization=f"inline-fp8-{grid}", verify=True)
    places = [ParallelConfig(), *(ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2))]
    if model == "qwen3_moe":
        places += [ParallelConfig(ep_size=2, ep_rank=rank) for rank in range(2)]
    for place in places:
        loaded = load_model(tmp_path, parallel=place, load=load)
        assert check_codes(loaded, tensors, grid) > 0, place
        params = {param.name: param.dtype for param in loaded.plan.model.params}
        assert params["lm_head.weight"] == params["embed.weight"] == str(dtype).removeprefix("torch.")
        assert all(not kind.startswith("float8") for name, kind in params.items() if "router" in name or "norm" in name)
        assert loaded.report.bytes_read >= sum(t.nbytes for t in loaded.plan.catalog.tensors) // 4
    wide = LoadConfig(device="cpu", quantization=f"inline-fp8-{grid}", dtype="float32")
    with torch.inference_mode():
        found = load_model(tmp_path, load=wide).model(token_ids())
        dense = {name: dequantised(name, tensor, grid) if quantised(name) else tensor.float() for name, tensor in tensors.items()}
        save_file(dense, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert distance(found, load_model(tmp_path, load=LoadConfig(device="cpu", dtype="float32")).model(token_ids())) < 1e-4


def test_stacked_experts_are_quantised_one_by_one(tmp_path: Path) -> None:
    """A tensor that holds all experts: each expert has scales of its own, and what is gathered is one expert's, not the stack."""
    model_class, config = MODELS["qwen3_moe"]
    plain_checkpoint("qwen3_moe", tmp_path / "apart")
    made = model_class.from_pretrained(tmp_path / "apart")
    made.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "stacked" / "model.safetensors"))
    load = LoadConfig(device="cpu", quantization="inline-fp8-tensor")
    apart, stacked = (load_model(tmp_path / name, load=load) for name in ("apart", "stacked"))
    for (name, one), (_, other) in zip(apart.model.named_parameters(), stacked.model.named_parameters(), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), name
    assert stacked.report.budget.transient == apart.report.budget.transient


def test_the_peak_is_that_of_fp8(tmp_path: Path) -> None:
    """96 MiB of float32 matrices, in parts of 1 MiB: the load takes what FP8 takes and what is predicted beside it, where plain
    weights would take four times as much; the measured peak stays below the prediction."""
    folder = save_tiny_llama(tmp_path / "wide", hidden_size=768, intermediate_size=3072, num_hidden_layers=3, num_attention_heads=12)
    load = LoadConfig(device="cpu", quantization="inline-fp8-tensor", buffer_mib=1, reader_threads=2)
    loaded = load_model(folder, load=load)
    plain = build_plan(folder, load=LoadConfig(device="cpu")).bytes_resident
    assert loaded.plan.bytes_resident < 0.27 * plain
    # Two matrices on their way with their codes, four steps of float32, buffers.
    assert loaded.report.budget.peak < loaded.plan.bytes_resident + 2 * (4 + 1) * 768 * 3072 + 36 * 2**20
    measured = loaded.report.measured_peak_bytes
    # What Python and torch take for the first time is no part of the plan: 32 MiB for it.
    assert measured is None or measured < loaded.report.budget.peak + 32 * 2**20


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    """A NaN in a matrix makes its scale NaN: it is named, and nothing is loaded."""
    folder = save_tiny_llama(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match="BAD_SCALE.*model.layers.1.mlp.up_proj.weight"):
        load_model(folder, load=LoadConfig(device="cpu", quantization="inline-fp8-tensor"))


def test_there_is_no_road_back(tmp_path: Path) -> None:
    """What was made while loading cannot be exported as the source, and every such tensor is listed."""
    folder = save_tiny_llama(tmp_path / "model")
    loaded = load_model(folder, load=LoadConfig(device="cpu", quantization="inline-fp8-channel"))
    with pytest.raises(PlanError, match="was quantised when it was loaded") as caught:
        export_checkpoint(loaded, tmp_path / "out")
    assert len(caught.value.problems) == 14


def test_the_digest_knows(tmp_path: Path) -> None:
    """Ranks that would make different codes do not agree."""
    folder = save_tiny_llama(tmp_path / "model")
    methods = [None, *(f"inline-fp8-{grid}" for grid in GRIDS)]
    assert len({build_plan(folder, load=LoadConfig(device="cpu", quantization=method)).digest for method in methods}) == 4
