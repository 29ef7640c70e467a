"""``mxfp4`` as gpt-oss has it: blocks and scales of all experts in one tensor, rows of gate and up in turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, build_plan, export_checkpoint, load_model
from rtp_llm.errors import RtpLlmError
from rtp_llm.layers.quantised import Quantisable
from rtp_llm.loader import LoadedModel
from rtp_llm.plan.views import plan_json
from rtp_llm.quantization.forms import Matrix
from rtp_llm.quantization.mxfp4 import _SPEC
from rtp_llm.quantization.scheme import Stored
from tests.models.decoders import reference_steps
from tests.models.reference import closeness, distance, token_ids
from tests.moe.rank_worker import Shape
from tests.moe.test_gpt_oss import PUBLISHED
from tests.quantization.formats import Tensors, declare, digest
from tests.quantization.gpt_oss import EXPERTS, MXFP4, make, oracle, published
from tests.support.ranks import run_ranks
from tests.support.sparse import nbytes, write_sparse_checkpoint

CPU = LoadConfig(device="cpu", dtype="float32")
STEPS = [15, 1, 8]
AT = "model.layers.1.mlp.experts"
#: TP 2 and 4 share one and two key/value heads, and divide four blocks; five experts divide over no number of ranks.
SHAPES = {2: [Shape(2, 1), Shape(1, 2)], 4: [Shape(4, 1), Shape(2, 2), Shape(1, 4)]}


def check(loaded: LoadedModel, wanted: Tensors) -> int:
    """Every matrix of a rank is its part of the oracle's, bit for bit."""
    compared = 0
    for layer in loaded.model.modules():
        for attribute, held in layer.held.items() if isinstance(layer, Quantisable) else ():
            for i, matrix in enumerate(held.matrices):
                found = held.scheme.dequantise(layer.tensors(attribute, i), matrix)
                assert torch.equal(found, wanted[matrix.slot][slice(*matrix.rows), slice(*matrix.columns)]), matrix
                compared += 1
    return compared


def test_every_code_and_every_scale() -> None:
    """All 16 codes on both sides of a byte with all scales that are numbers, in the dtypes of weights: what transformers makes of
    them, bit for bit."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    scheme = _SPEC.build({"blocks": Stored("uint8", (255, 16, 16)), "scales": Stored("uint8", (255, 16))})
    found = scheme.dequantise({"blocks": blocks[0], "scales": scales[0]}, Matrix("", (255, 512), (0, 255), (0, 512)))
    for dtype in (torch.float32, torch.bfloat16):
        wanted = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].t()
        assert torch.equal(found.to(dtype), wanted)


def test_weights_logits_and_export(tmp_path: Path) -> None:
    """Dequantised weights equal transformers' bit for bit, whole and at each split; logits as its own, at once and in steps; every
    place equals what safetensors reads; and the export is the source, byte for byte."""
    folder = tmp_path / "source"
    wanted = make(folder)
    loaded = load_model(folder, load=LoadConfig(device="cpu", dtype="float32", verify=True))
    assert check(loaded, wanted) == 2 * 2 * EXPERTS
    model, ids, reference = loaded.model, token_ids(), oracle(folder)
    with torch.inference_mode():
        assert distance(model(ids), reference(ids).logits) < 1e-4
        cache = model.new_cache(len(ids), ids.shape[1])  # type: ignore[operator]
        stepped = torch.cat([model(part, cache) for part in ids.split(STEPS, dim=1)], dim=1)
    assert distance(stepped, reference_steps(reference, ids, STEPS)) < 1e-4
    for shape in (shape for shapes in SHAPES.values() for shape in shapes):
        ranks = [(tp, ep) for tp in range(shape.tp_size) for ep in range(shape.ep_size)]
        parts = [load_model(folder, parallel=ParallelConfig(shape.tp_size, tp, shape.ep_size, ep), load=CPU) for tp, ep in ranks]
        assert sum(check(part, wanted) for part in parts) == 2 * 2 * EXPERTS * shape.tp_size
        digests = {part.plan.digest for part in parts}
        assert len(digests) == 1
    assert digest(export_checkpoint(loaded, tmp_path / "out")) == digest(folder)


def test_bfloat16_as_published(tmp_path: Path) -> None:
    """Left to itself the model is bfloat16, as transformers': cosine above 0.999.  Codes and scales take what they take in the file,
    and are read once: with all else, the bytes of its tensors."""
    make(tmp_path)
    loaded, reference = load_model(tmp_path, device="cpu"), oracle(tmp_path, torch.bfloat16)
    assert loaded.plan.model.dtype == "bfloat16"
    assert loaded.plan.bytes_read == loaded.plan.bytes_resident == sum(t.nbytes for t in loaded.plan.catalog.tensors)
    with torch.inference_mode():
        assert closeness(loaded.model(token_ids()), reference(token_ids()).logits) > 0.999
    said = plan_json(loaded.plan, loaded.report.budget)
    assert said["experts"][0]["layout"] == {"down": "stacked", "gate_up": "stacked"}
    assert said["quantization"]["schemes"] == [{"scheme": "MXFP4, a scale for each 32 columns", "modules": 2 * 2 * EXPERTS}]
    matched = {one["entry"]: one["matched"] for one in said["quantization"]["lists"]}
    assert matched == {"model.layers.*.self_attn": 8, "model.layers.*.mlp.router": 2, "model.embed_tokens": 1, "lm_head": 1}


def work(jobs: list[tuple[str, Shape, str]], ids: torch.Tensor) -> list[torch.Tensor]:
    """Loads each checkpoint, computes, and exports."""
    found = []
    for folder, shape, method in jobs:
        load = LoadConfig(device="cpu", dtype="float32", load_method=method, timeout_s=60)
        loaded = load_model(folder, parallel=shape.place(), load=load)
        assert loaded.report.load_method == method
        with torch.inference_mode():
            found.append(loaded.model(ids))
        export_checkpoint(loaded, f"{folder}-{shape.tp_size}-{shape.ep_size}-{method}")
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_computes(size: int, tmp_path: Path) -> None:
    """TP 2 and 4, EP 2 and 4, both, by both transports: logits as one rank's, equal on all ranks to the last bit; the export is the
    source byte for byte."""
    make(tmp_path / "source")
    folder = str(tmp_path / "source")
    jobs = [(folder, shape, method) for shape in SHAPES[size] for method in ("scratch", "fastsafetensors")]
    results = run_ranks(size, work, jobs, token_ids(), timeout=240)
    with torch.inference_mode():
        alone = load_model(folder, load=CPU).model(token_ids())
    for job, *ranks in zip(jobs, *(result.value for result in results), strict=True):
        assert distance(ranks[0], alone) < 1e-4, job
        assert all(torch.equal(ranks[0], other) for other in ranks), job
        _, shape, method = job
        assert digest(Path(f"{folder}-{shape.tp_size}-{shape.ep_size}-{method}")) == digest(Path(folder)), job


def test_a_rank_reads_its_own_experts(tmp_path: Path) -> None:
    """Of codes, scales and biases a rank reads those of its experts, and at TP its blocks: what is in its memory, and no more."""
    make(tmp_path)
    for place in (ParallelConfig(2, 1), ParallelConfig(4, 3), ParallelConfig(1, 0, 5, 2), ParallelConfig(2, 0, 2, 1)):
        plan = build_plan(tmp_path, place, LoadConfig(device="cpu"))
        read = sum(d.nbytes for d in plan.deliveries if ".experts." in d.slot)
        held = sum(prod(p.shape) * (1 if p.dtype == "uint8" else 2) for p in plan.model.params if ".experts." in p.name)
        assert read == held > 0


def put(name: str, value: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{AT}.{name}"][3].view(-1)[1] = value

    return change


def without(*names: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[f"{AT}.{name}"]

    return change


def turned(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj_scales"] = tensors[f"{AT}.down_proj_scales"].transpose(1, 2)


def flat(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj_blocks"] = tensors[f"{AT}.down_proj_blocks"].flatten(2)


def fewer(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj_blocks"] = tensors[f"{AT}.down_proj_blocks"][:4]


def narrow(tensors: Tensors) -> None:
    tensors[f"{AT}.down_proj_scales"] = tensors[f"{AT}.down_proj_scales"].view(torch.int8)


def plain(tensors: Tensors) -> None:
    without("down_proj_blocks", "down_proj_scales")(tensors)
    tensors[f"{AT}.down_proj"] = torch.zeros(EXPERTS, 128, 64)


def attention(tensors: Tensors) -> None:
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    tensors["model.layers.0.self_attn.o_proj.blocks"] = torch.zeros(64, 2, 16, dtype=torch.uint8)
    tensors["model.layers.0.self_attn.o_proj.scales"] = torch.zeros(64, 2, dtype=torch.uint8)


FAULTS: dict[str, tuple[Callable[[Tensors], object], str, str]] = {
    "a scale that is no number": (
        put("down_proj_scales", 255),
        "BAD_SCALE",
        rf"{AT}.down_proj_scales\).*experts.3.down|experts.3.down.*nan",
    ),
    "no scales": (without("down_proj_scales"), "MISSING_PART", rf"{AT}.down_proj_scales\b"),
    "no blocks": (without("gate_up_proj_blocks"), "MISSING_PART", rf"{AT}.gate_up_proj_blocks\b"),
    "scales turned": (turned, "WRONG_GRID", rf"{AT}.down_proj_scales\): expected \[64, 4\], found \[4, 64\].*exchanged"),
    "blocks of two dimensions": (flat, "SOURCE_UNCOVERED", rf"{AT}.down_proj_blocks\): expected \[5 experts, size, blocks, bytes\]"),
    "fewer experts": (fewer, "EXPERT_COUNT", rf"config.json says 5 .*{AT}.down_proj_blocks"),
    "scales of another type": (narrow, "CONTRADICTION", rf"{AT}.down_proj_scales\): expected uint8 or float8_e8m0fnu, found int8"),
    "declared and plain": (plain, "CONTRADICTION", rf"{AT}.down_proj\): expected quantised tensors"),
    "a layer that is no expert": (attention, "UNSUPPORTED_LAYER", r"layers\.0\.self_attn\.o_proj"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_message(name: str, tmp_path: Path) -> None:
    """Its own code, the tensor's own name, what was expected and found; a tensor of all experts is named once."""
    change, code, words = FAULTS[name]
    make(tmp_path, change=change)
    with pytest.raises(RtpLlmError) as caught:
        load_model(tmp_path, load=CPU)
    found = caught.value.problems
    assert [problem.code for problem in found] == [code], found
    assert re.search(words, str(found[0])), found


def test_another_number_of_experts_is_named(tmp_path: Path) -> None:
    """Where config.json counts otherwise than every tensor, that is what is wrong, and not that nothing is quantised."""
    make(tmp_path)
    declare(tmp_path, num_local_experts=EXPERTS + 1)
    with pytest.raises(RtpLlmError) as caught:
        build_plan(tmp_path, load=CPU)
    assert {problem.code for problem in caught.value.problems} == {"EXPERT_COUNT"}
    assert f"{AT}.gate_up_proj_blocks" in {problem.tensor for problem in caught.value.problems}


def test_experts_that_the_list_excludes_are_plain(tmp_path: Path) -> None:
    """A list without the attention says nothing of it; one that names experts contradicts their tensors."""
    make(tmp_path)
    declare(tmp_path, quantization_config=MXFP4 | {"modules_to_not_convert": ["lm_head"]})
    assert not build_plan(tmp_path, load=CPU).problems
    declare(tmp_path, quantization_config=MXFP4 | {"modules_to_not_convert": None})
    assert not build_plan(tmp_path, load=CPU).problems
    declare(tmp_path, quantization_config=MXFP4 | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]})
    with pytest.raises(RtpLlmError, match=r"CONTRADICTION.*experts.down_proj.*|is excluded from quantisation"):
        build_plan(tmp_path, load=CPU)


def test_the_published_model_is_planned(tmp_path: Path) -> None:
    """gpt-oss-120b from headers alone: every byte of its 65 GB has its place; eight ranks as TP 2 and EP 4 hold a quarter of the
    experts each, a half of them; and four ranks, which would cut one of 90 blocks, are refused with the sizes that work."""
    tensors = published()
    config = {**PUBLISHED, "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}
    write_sparse_checkpoint(tmp_path, tensors, 15, {**config, "architectures": ["GptOssForCausalLM"], "quantization_config": MXFP4})
    total = sum(nbytes(*tensor) for tensor in tensors.values())
    alone, shared = (build_plan(tmp_path, place, LoadConfig(device="cpu")) for place in (ParallelConfig(), ParallelConfig(2, 1, 4, 3)))
    assert not alone.problems and alone.bytes_read == alone.bytes_resident == total
    codes = sum(nbytes(*tensor) for name, tensor in tensors.items() if ".experts." in name and not name.endswith("bias"))
    held = sum(prod(p.shape) for p in shared.model.params if p.dtype == "uint8")
    assert not shared.problems and held == codes // 8
    with pytest.raises(RtpLlmError, match=r"MISALIGNED.*down_proj_blocks\): expected tp_size one of \[1, 2\]"):
        build_plan(tmp_path, ParallelConfig(4), CPU)


def test_plain_and_quantised_models_hold_the_same(tmp_path: Path) -> None:
    """Written out plain by transformers, transposed again, the model computes the same."""
    make(tmp_path / "mxfp4")
    oracle(tmp_path / "mxfp4").save_pretrained(tmp_path / "plain")
    declare(tmp_path / "plain", quantization_config=None)
    models: list[Any] = [load_model(tmp_path / name, load=CPU).model for name in ("mxfp4", "plain")]
    experts = models[1].layers[0].mlp.experts
    assert torch.equal(models[0].layers[0].mlp.experts.dense("gate_up", 2), experts.gate_up[2])
    with torch.inference_mode():
        assert distance(models[0](token_ids()), models[1](token_ids())) < 1e-4
