"""Lists of modules, each by the semantics of its format; entries are those of published configurations."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, build_plan
from rtp_llm.plan.views import quantization_json
from rtp_llm.quantization.faults import QuantizationError
from rtp_llm.quantization.names import Match, Names
from tests.quantization.formats import FORMATS, Tensors, declare, make

CPU = LoadConfig(device="cpu")
Q = "model.layers.3.self_attn.q_proj"
GATE = "model.layers.3.mlp.gate"
GATE_PROJ = "model.layers.3.mlp.gate_proj"
EXPERT = "model.layers.3.mlp.experts.7.up_proj"
VISION = "model.visual.blocks.0.attn.qkv"


@pytest.mark.parametrize(
    ("match", "entry", "yes", "no"),
    [
        # compressed-tensors: exact, or an expression anchored at the start only.
        ("anchored", "lm_head", ["lm_head"], ["model.lm_head_norm", Q]),
        ("anchored", "re:.*mlp.gate$", [GATE], [GATE_PROJ]),
        ("anchored", "re:.*mlp.gate", [GATE, GATE_PROJ], [Q]),
        ("anchored", "re:visual.*", [VISION], [Q]),
        ("anchored", "re:.*self_attn.*", [Q], [GATE]),
        ("anchored", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", [GATE_PROJ], [GATE, EXPERT]),
        ("anchored", "re:.*embed_tokens$", ["model.embed_tokens"], [Q]),
        ("anchored", r"re:.*shared_expert_gate$", ["model.layers.3.mlp.shared_expert_gate"], [GATE]),
        ("anchored", "model.layers.3.mlp", [], [GATE, GATE_PROJ]),
        ("anchored", "model.layers.{i}.mlp.gate", [GATE], [GATE_PROJ, EXPERT]),
        # Lists written for fused models, and for other wrappers' prefixes.
        ("anchored", "model.layers.3.self_attn.qkv_proj", [Q], [GATE]),
        ("anchored", "model.layers.3.mlp.gate_up_proj", [GATE_PROJ], [GATE]),
        ("anchored", "model.language_model.layers.3.mlp.gate", [GATE, "language_model.model.layers.3.mlp.gate"], [GATE_PROJ]),
        ("anchored", "re:model.language_model.layers.3.*", [Q], ["model.layers.4.self_attn.q_proj"]),
        # Hugging Face's fp8 and mxfp4: whole dotted parts.
        ("segments", "mlp.gate", [GATE], [GATE_PROJ, EXPERT]),
        ("segments", "model.layers.3.mlp.gate", [GATE], [GATE_PROJ, "model.layers.13.mlp.gate"]),
        ("segments", "visual", [VISION], [Q]),
        ("segments", "model.layers.*.self_attn", [Q], [GATE]),
        ("segments", "model.layers.*.mlp.router", ["model.layers.3.mlp.router"], [GATE]),
        ("segments", "model.layers.{i}.mlp.gate", [GATE], [GATE_PROJ]),
        ("segments", "lm_head", ["lm_head"], ["model.lm_heads"]),
        # AWQ: a substring anywhere.
        ("substring", "visual", [VISION, "model.visualiser.proj"], [Q]),
        ("substring", "gate", [GATE, GATE_PROJ], [Q]),
        # ModelOpt and Quark: globs over the name or one of its parts.
        ("glob", "*.mlp.gate", [GATE], [GATE_PROJ]),
        ("glob", "model.layers.3*", [Q, GATE], ["model.layers.4.mlp.gate"]),
        ("glob", "q_proj*", [Q], [GATE]),
        ("glob", "lm_head", ["lm_head"], [Q]),
        ("glob", "*lm_head", ["lm_head", "model.lm_head"], [Q]),
    ],
)
def test_each_format_has_its_own_idea_of_a_match(match: Match, entry: str, yes: list[str], no: list[str]) -> None:
    """What matches, and what only looks as if it did."""
    names = Names((entry,), match)
    assert [name for name in yes if names.matching(name) != (entry,)] == []
    assert [name for name in no if names.matching(name)] == []


def test_order_and_container_do_not_matter() -> None:
    """A list is what it holds: doubles and order change nothing."""
    assert Names(("b", "a", "b")) == Names(("a", "b"))
    assert Names(("mlp.gate", "lm_head"), "segments").matching(GATE) == ("mlp.gate",)


def test_an_expression_may_not_take_for_ever() -> None:
    """A checkpoint's expression that backtracks without end is refused, not waited for."""
    with pytest.raises(QuantizationError, match=r"SLOW_PATTERN.*\(a\|aa\)"):
        Names(("re:(a|aa)+$",)).matching("a" * 60 + "b")


def _plain(module: str) -> Any:
    def change(tensors: Tensors) -> None:
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float()
        for name in [n for n in tensors if n.startswith(f"{module}.") and n != f"{module}.weight"]:
            del tensors[name]

    return change


def test_exclusions_are_held_against_the_tensors_and_reported(tmp_path: Path) -> None:
    """A plain matrix that a list names is fine, one that it does not name is a contradiction; the plan says how many modules
    each entry matched, nothing included."""
    module = "model.layers.1.mlp.down_proj"
    make(FORMATS["fp8-static"], "llama", tmp_path, change=_plain(module))
    with pytest.raises(QuantizationError, match="CONTRADICTION.*stored plain"):
        build_plan(tmp_path, load=CPU)
    listed = ["lm_head", "layers.1.mlp.down_proj", "visual", "model.layers.{i}.mlp.gate"]
    declare(tmp_path, quantization_config=FORMATS["fp8-static"].config | {"ignored_layers": listed})
    plan = build_plan(tmp_path, load=CPU)
    assert not plan.problems
    found = quantization_json(plan)
    assert found["method"] == "fp8" and found["schemes"] == [{"scheme": "FP8, a scale for each tensor, static activations", "modules": 13}]
    assert {entry["entry"]: entry["matched"] for entry in found["lists"]} == {
        "lm_head": 1,
        "layers.1.mlp.down_proj": 1,
        "visual": 0,
        "model.layers.{i}.mlp.gate": 0,
    }


def test_without_a_list_the_tensors_decide(tmp_path: Path) -> None:
    """DeepSeek-V3 lists nothing: plain matrices are plain, and are reported."""
    module = "model.layers.1.mlp.down_proj"
    make(FORMATS["fp8-block"], "llama", tmp_path, change=_plain(module))
    plan = build_plan(tmp_path, load=CPU)
    assert not plan.problems and plan.model.quantization is not None
    assert plan.model.quantization.undeclared == (module,)


def test_router_gates_norms_and_embeddings_stay_plain(tmp_path: Path) -> None:
    """With experts, too, nothing but linear layers and experts is quantised; KV-cache scales are skipped by name and reason."""

    def change(tensors: Tensors) -> None:
        for name in ("k_scale", "v_proj.v_scale", "k_proj.output_scale"):
            tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([0.5])

    make(FORMATS["fp8-block"], "qwen3_moe", tmp_path, change=change)
    plan = build_plan(tmp_path, load=CPU)
    assert not plan.problems
    plain = {param.name for param in plan.model.params if param.dtype in ("float32", "bfloat16") and "scale" not in param.name}
    assert all("norm" in name or name in ("embed.weight", "lm_head.weight") or "router" in name for name in plain)
    skipped = {one.raw: one.reason for one in plan.skipped}
    assert len(skipped) == 3 and all("KV cache" in reason for reason in skipped.values())


def test_an_unknown_kv_scale_is_refused(tmp_path: Path) -> None:
    """A scale that nobody knows is not silently 1.0."""

    def change(tensors: Tensors) -> None:
        tensors["model.layers.0.self_attn.kv_quantiser_scale"] = torch.tensor([0.5])

    make(FORMATS["fp8-block"], "llama", tmp_path, change=change)
    assert build_plan(tmp_path, load=CPU).unexpected == ("model.layers.0.self_attn.kv_quantiser_scale",)


def test_long_lists_cost_a_look_up_a_name() -> None:
    """A glob for each of 200 layers, names one by one, and 45,000 modules, as DeepSeek-V3's conversions have them: a second or two."""
    names = Names((*(f"model.layers.{i}.self_attn*" for i in range(200)), *(f"model.layers.{i}.mlp.gate" for i in range(200))), "glob")
    start = time.process_time()
    found = [
        names.matching(f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj")
        for layer in range(59)
        for expert in range(256)
        for part in ("gate", "up", "down")
    ]
    assert not any(found) and names.matching("model.layers.7.self_attn.q_proj") == ("model.layers.7.self_attn*",)
    assert time.process_time() - start < 10
