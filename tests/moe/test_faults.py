"""Every fault of a checkpoint with experts has its own message, on every rank alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import ParallelConfig, build_plan
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.models.faults import ModelFault
from tests.moe.variants import make

Tensors = dict[str, torch.Tensor]
_AT = "model.layers.1.mlp"


def spoilt(folder: Path, variant: str, spoil: Callable[[Tensors], None], *, published: bool = True) -> Path:
    """A checkpoint after ``spoil`` has had its way with the tensors."""
    make(variant, folder, published=published)
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def problems(folder: Path) -> tuple[Problem, ...]:
    """Those of the plan; the same on a rank that holds expert 6 and on one that does not."""
    first, second = (build_plan(folder, ParallelConfig(ep_size=2, ep_rank=rank)).problems for rank in (0, 1))
    assert first == second
    return first


def reconfigured(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_an_expert_is_missing(tmp_path: Path) -> None:
    """The name that it should have, in this checkpoint's own spelling, whichever rank was to hold it."""
    folder = spoilt(tmp_path, "mixtral", lambda t: t.pop("model.layers.1.block_sparse_moe.experts.6.w3.weight") is None)
    (problem,) = problems(folder)
    assert problem.code == "MISSING_TENSOR"
    assert problem.tensor == "model.layers.1.block_sparse_moe.experts.6.w3.weight"
    assert "layers.1.experts.6.up.weight" in problem.what
    assert build_plan(folder).missing == (problem.tensor,)


def test_a_stack_is_missing(tmp_path: Path) -> None:
    """Without a neighbour to go by, every spelling is proposed; the stacked ones are among them, and no template is."""
    folder = spoilt(tmp_path, "qwen3_moe", lambda t: t.pop(f"{_AT}.experts.gate_up_proj") is None, published=False)
    found = problems(folder)
    assert {problem.code for problem in found} == {"MISSING_TENSOR"} and len(found) == 14
    assert all(f"{_AT}.experts.gate_up_proj" in str(problem.expected) and "{}" not in str(problem) for problem in found)


def test_an_expert_is_there_twice(tmp_path: Path) -> None:
    """One expert beside the stack that holds it already."""

    def double(tensors: Tensors) -> None:
        tensors[f"{_AT}.experts.3.down_proj.weight"] = tensors[f"{_AT}.experts.down_proj"][3].clone()

    (problem,) = problems(spoilt(tmp_path, "qwen3_moe", double, published=False))
    assert problem.code == "DOUBLED_TENSOR"
    assert {str(problem.tensor), *problem.what.split()} >= {f"{_AT}.experts.3.down_proj.weight", f"{_AT}.experts.down_proj"}


def test_an_expert_has_another_shape(tmp_path: Path) -> None:
    """Expected and found, and a hint where the dimensions are merely exchanged."""

    def turn(tensors: Tensors) -> None:
        tensors[f"{_AT}.experts.6.gate_proj.weight"] = tensors[f"{_AT}.experts.6.gate_proj.weight"].T
        tensors[f"{_AT}.experts.5.up_proj.weight"] = tensors[f"{_AT}.experts.5.up_proj.weight"][:-1]

    short, turned = sorted(problems(spoilt(tmp_path, "qwen3_moe", turn)), key=lambda p: str(p.tensor))
    assert short.code == turned.code == "SHAPE_MISMATCH"
    assert (short.expected, short.actual) == ("[24, 32]", "[23, 32]") and "exchanged" not in str(short.fix)
    assert (turned.expected, turned.actual) == ("[24, 32]", "[32, 24]") and "exchanged" in str(turned.fix)


def test_gate_and_up_are_swapped(tmp_path: Path) -> None:
    """A stack with up above gate has the shape of a right one; its name tells."""

    def swap(tensors: Tensors) -> None:
        gate, up = tensors.pop(f"{_AT}.experts.gate_up_proj").chunk(2, dim=1)
        tensors[f"{_AT}.experts.up_gate_proj"] = torch.cat([up, gate], dim=1)

    found = problems(spoilt(tmp_path, "qwen3_moe", swap, published=False))
    (swapped,) = [problem for problem in found if problem.code == "UNEXPECTED_TENSOR"]
    assert "holds up before gate" in swapped.what
    assert {problem.code for problem in found} == {"UNEXPECTED_TENSOR", "MISSING_TENSOR"}


def test_a_correction_bias_in_bfloat16(tmp_path: Path) -> None:
    """It has lost what the choice of experts rests on: refused, though every other tensor may be cast."""

    def narrow(tensors: Tensors) -> None:
        tensors[f"{_AT}.gate.e_score_correction_bias"] = tensors[f"{_AT}.gate.e_score_correction_bias"].bfloat16()
        tensors[f"{_AT}.gate.weight"] = tensors[f"{_AT}.gate.weight"].bfloat16()

    (problem,) = problems(spoilt(tmp_path, "glm4_moe", narrow))
    assert problem.code == "PRECISION_LOST"
    assert problem.tensor == f"{_AT}.gate.e_score_correction_bias"
    assert (problem.expected, problem.actual) == ("float32 or wider", "BF16")


@pytest.mark.parametrize("count", [4, 9])
def test_another_number_of_experts_by_one(count: int, tmp_path: Path) -> None:
    """One message for all layers, and nothing about each of the experts that follows from it."""
    make("qwen2_moe", tmp_path)
    reconfigured(tmp_path, num_experts=count)
    (problem,) = problems(tmp_path)
    assert problem.code == "EXPERT_COUNT"
    assert "chooses among 7 experts, and so do those of 1 more layers" in problem.what
    assert (problem.expected, problem.actual) == (f"{count}, as config.json says", "7")


def test_another_number_of_stacked_experts(tmp_path: Path) -> None:
    """Router and stacks say the same of themselves; each stack is named."""
    make("qwen3_moe", tmp_path, published=False)
    reconfigured(tmp_path, num_local_experts=8)
    found = problems(tmp_path)
    assert {problem.code for problem in found} == {"EXPERT_COUNT"} and len(found) == 1 + 4
    assert sum("holds 7 experts, and config.json says 8" in problem.what for problem in found) == 4


def test_a_stack_lacks_an_expert(tmp_path: Path) -> None:
    """The router agrees with the configuration, so it is this tensor that is short."""

    def cut(tensors: Tensors) -> None:
        tensors[f"{_AT}.experts.down_proj"] = tensors[f"{_AT}.experts.down_proj"][:-1]

    (problem,) = problems(spoilt(tmp_path, "qwen3_moe", cut, published=False))
    assert problem.code == "EXPERT_COUNT" and problem.tensor == f"{_AT}.experts.down_proj"


@pytest.mark.parametrize("shape", [(7, 24), (7, 1, 24, 32), ()])
def test_a_stack_of_another_form(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Not three dimensions: one message, with the form that is expected."""

    def flatten(tensors: Tensors) -> None:
        tensors[f"{_AT}.experts.down_proj"] = torch.zeros(shape)

    (problem,) = problems(spoilt(tmp_path, "qwen3_moe", flatten, published=False))
    assert problem.code == "SOURCE_UNCOVERED" and problem.expected == "[7 experts, size, in]"


def test_a_stack_of_millions_of_empty_experts(tmp_path: Path) -> None:
    """A dimension that costs no bytes costs no time either."""

    def hollow(tensors: Tensors) -> None:
        tensors[f"{_AT}.experts.down_proj"] = torch.zeros(2**40, 0, 4)

    (problem,) = problems(spoilt(tmp_path, "qwen3_moe", hollow, published=False))
    assert problem.code == "EXPERT_COUNT"


def test_layers_behind_the_last_one_are_skipped_by_name(tmp_path: Path) -> None:
    """Multi-token prediction: as many layers as the configuration names, experts included; one more is unexpected."""

    def extend(tensors: Tensors) -> None:
        tensors |= {name.replace("layers.1.", "layers.2."): t.clone() for name, t in tensors.items() if "layers.1." in name}
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(2, 2)

    folder = spoilt(tmp_path, "glm4_moe", extend)
    plan = build_plan(folder)
    assert not plan.problems
    skipped = {s.raw: s.reason for s in plan.skipped}
    assert "model.layers.2.mlp.experts.0.up_proj.weight" in skipped and "model.layers.2.eh_proj.weight" in skipped
    assert set(skipped.values()) == {"layers for multi-token prediction are not run"}
    reconfigured(folder, num_nextn_predict_layers=0)
    assert set(build_plan(folder).unexpected) == set(skipped)


@pytest.mark.parametrize(
    ("variant", "fields", "named"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 8}, ["num_experts_per_tok"]),
        ("qwen3_moe", {"num_local_experts": 0, "moe_intermediate_size": -1}, ["moe_intermediate_size", "num_local_experts"]),
        ("qwen3_moe", {"num_experts": 7, "num_local_experts": 8}, ["num_local_experts"]),
        ("qwen2_moe", {"num_experts": "7", "norm_topk_prob": 1}, ["norm_topk_prob", "num_experts"]),
        ("qwen2_moe", {"mlp_only_layers": [0.5], "decoder_sparse_step": 0}, ["decoder_sparse_step", "mlp_only_layers"]),
        ("mixtral", {"num_local_experts": 10**9}, ["num_local_experts"]),
        ("glm4_moe", {"n_group": 3}, ["n_group"]),
        ("glm4_moe", {"n_group": 8, "topk_group": 3}, ["n_group"]),
        ("glm4_moe", {"n_group": 4, "topk_group": 5}, ["topk_group"]),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, ["num_experts_per_tok"]),
        ("glm4_moe", {"routed_scaling_factor": 0, "n_shared_experts": 0}, ["n_shared_experts", "routed_scaling_factor"]),
    ],
)
def test_fields_that_no_model_can_have(variant: str, fields: dict[str, object], named: list[str], tmp_path: Path) -> None:
    """Unroutable combinations and senseless sizes are refused when the configuration is read, all at once."""
    make(variant, tmp_path)
    reconfigured(tmp_path, **fields)
    with pytest.raises(ConfigError) as caught:
        build_plan(tmp_path)
    assert [problem.what.removeprefix("field ") for problem in sorted(caught.value.problems, key=lambda p: p.what)] == named
    assert {problem.fault for problem in caught.value.problems} <= {ModelFault.BAD_FIELD, ModelFault.UNSUPPORTED_FIELD}
