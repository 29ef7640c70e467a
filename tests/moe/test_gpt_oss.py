"""gpt-oss: its configuration as transformers reads it, and what its stacks, biases and sinks are refused for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from rtp_llm import LoadConfig, ParallelConfig, build_plan, load_model
from rtp_llm.errors import ConfigError
from rtp_llm.kernels.attention import AttentionNeed
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.interface import kernel_needs
from rtp_llm.layers.rotary import Rotary
from rtp_llm.models.gpt_oss.config import parse_config
from tests.models.reference import distance, token_ids
from tests.moe.variants import VARIANTS, make

CPU = LoadConfig(device="cpu")
AT = "model.layers.1.mlp.experts"

#: ``config.json`` of gpt-oss-20b, without fields that say nothing of the model.
PUBLISHED: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}

RAW: dict[str, dict[str, Any]] = {
    "nothing": {},
    "published": PUBLISHED,
    "null": {"layer_types": None, "rope_parameters": None},
    "other rotation": {"rope_parameters": {"rope_type": "default"}, "swiglu_alpha": 1.5, "swiglu_limit": 3.0, "attention_bias": False},
    "empty scaling": {"rope_scaling": {}, "rope_theta": 1e4},
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
def test_the_configuration_is_what_transformers_reads(raw: dict[str, Any]) -> None:
    """Sizes, windows, gate, biases, routing and rotary tables, of files that say all and that say little."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    theirs, ours = GptOssConfig(**json.loads(json.dumps(raw))), parse_config(raw, ())
    d, shape = ours.decoder, ours.moe.shape
    assert (d.vocab_size, d.hidden_size, d.layers, d.heads) == (
        theirs.vocab_size,
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    assert (d.kv_heads, d.head_dim, d.norm_eps, d.tied) == (
        theirs.num_key_value_heads,
        theirs.head_dim,
        theirs.rms_norm_eps,
        theirs.tie_word_embeddings,
    )
    assert d.windows == tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert d.qkv_bias == d.output_bias == theirs.attention_bias and d.sinks
    assert (shape.intermediate_size, shape.routing.experts, shape.routing.top_k) == (
        theirs.intermediate_size,
        theirs.num_local_experts,
        theirs.num_experts_per_tok,
    )
    assert shape.alternating is not None
    assert (shape.alternating.alpha, shape.alternating.limit) == (theirs.swiglu_alpha, theirs.swiglu_limit)
    tables = Rotary(d.rope).tables(0, 5000, dtype=torch.float32, device=torch.device("cpu"))
    assert tables is not None
    for mine, reference in zip(tables, GptOssRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(5000)[None]), strict=True):
        torch.testing.assert_close(mine, reference[0].repeat(1, 2), rtol=0, atol=1e-5)


def test_what_the_experts_cannot_do_is_refused_at_once() -> None:
    """Another activation, a window that is not given, a clamp of nothing: three problems in one error."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"hidden_act": "gelu", "sliding_window": None, "swiglu_limit": 0}, ())
    assert sorted(problem.what for problem in caught.value.problems) == ["field hidden_act", "field sliding_window", "field swiglu_limit"]


Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def cut(name: str, *slices: slice) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name][slices].clone()

    return change


def upright(tensors: Tensors) -> None:
    tensors[f"{AT}.gate_up_proj"] = tensors[f"{AT}.gate_up_proj"].transpose(1, 2)


def renamed(tensors: Tensors) -> None:
    tensors[f"{AT}.up_gate_proj"] = tensors.pop(f"{AT}.gate_up_proj")


FAULTS: dict[str, tuple[Callable[[Tensors], object], dict[str, int], str]] = {
    "no bias of gate and up": (without(f"{AT}.gate_up_proj_bias"), {"MISSING_TENSOR": 7}, r"experts\.6\.gate_up\.bias"),
    "no stack": (without(f"{AT}.down_proj"), {"MISSING_TENSOR": 7}, rf"{AT}.down_proj\b"),
    "no sinks": (without("model.layers.0.self_attn.sinks"), {"MISSING_TENSOR": 1}, r"layers\.0\.attn\.sinks"),
    "no bias of the router": (without("model.layers.0.mlp.router.bias"), {"MISSING_TENSOR": 1}, r"layers\.0\.router\.bias"),
    "fewer experts": (cut(f"{AT}.down_proj", slice(6)), {"EXPERT_COUNT": 1}, "holds 6 experts, and config.json says 7"),
    "fewer biases": (cut(f"{AT}.down_proj_bias", slice(6)), {"EXPERT_COUNT": 1}, "holds 6 experts, and config.json says 7"),
    "biases too short": (cut(f"{AT}.gate_up_proj_bias", slice(None), slice(46)), {"SHAPE_MISMATCH": 7}, r"expected \[48\], found \[46\]"),
    "sinks of fewer heads": (cut("model.layers.0.self_attn.sinks", slice(3)), {"SHAPE_MISMATCH": 1}, r"expected \[4\], found \[3\]"),
    "not transposed": (upright, {"SHAPE_MISMATCH": 7}, "look exchanged"),
    "up before gate": (renamed, {"MISSING_TENSOR": 7, "UNEXPECTED_TENSOR": 1}, "up before gate by its name"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_stacks_that_are_not_right_are_refused(name: str, tmp_path: Path) -> None:
    """Each with its own code and the tensor's name; the same on a rank that holds expert 6 and on one that does not."""
    change, codes, words = FAULTS[name]
    make("gpt_oss", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    first, second = (build_plan(tmp_path, ParallelConfig(ep_size=2, ep_rank=rank), CPU).problems for rank in (0, 1))
    assert first == second
    found = [problem.code for problem in first]
    assert {code: found.count(code) for code in found} == codes
    assert any(re.search(words, str(problem)) for problem in first), first


def test_each_part_is_divided_as_it_is_used(tmp_path: Path) -> None:
    """TP 2: pairs of gate and up with their biases, half of the columns of down, its bias whole on both ranks, two of four sinks."""
    make("gpt_oss", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for rank in (0, 1):
        model: Any = load_model(tmp_path, device="cpu", parallel=ParallelConfig(2, rank)).model
        experts, pairs, inner = model.layers[1].mlp.experts, slice(24 * rank, 24 * rank + 24), slice(12 * rank, 12 * rank + 12)
        assert torch.equal(experts.gate_up, stored[f"{AT}.gate_up_proj"][:, :, pairs].transpose(1, 2))
        assert torch.equal(experts.gate_up_bias, stored[f"{AT}.gate_up_proj_bias"][:, pairs])
        assert torch.equal(experts.down, stored[f"{AT}.down_proj"][:, inner].transpose(1, 2))
        assert torch.equal(experts.down_bias, stored[f"{AT}.down_proj_bias"])
        assert torch.equal(model.layers[1].attn.sinks.weight, stored["model.layers.1.self_attn.sinks"][2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("method", ["inline-fp8-tensor", "inline-fp8-channel", "inline-fp8-block"])
def test_fp8_made_while_loading(method: str, tmp_path: Path) -> None:
    """Experts that stand transposed are quantised as others are, biases and sinks stay: logits near those of the plain model."""
    reference = make("gpt_oss", tmp_path)
    loaded = load_model(tmp_path, load=LoadConfig(device="cpu", quantization=method))
    assert {str(p.dtype) for name, p in loaded.model.named_parameters() if "bias" in name or "sinks" in name} == {"torch.float32"}
    with torch.inference_mode():
        assert 0 < distance(loaded.model(token_ids()), reference(token_ids()).logits) < 0.5


def test_attention_with_sinks_is_torchs(tmp_path: Path) -> None:
    """Every layer says that it has sinks, with its window; flashinfer says that it has no such attention."""
    make("gpt_oss", tmp_path)
    needs = [need for need in kernel_needs(load_model(tmp_path, device="cpu").model) if isinstance(need, AttentionNeed)]
    assert {(need.op, need.call.window) for need in needs} == {
        (op, w) for op in ("attention.prefill", "attention.decode") for w in (5, None)
    }
    assert all(need.call.sinks and "sinks" in need.text and "sinks" in FLASHINFER.functions[need.op].limit(need) for need in needs)


def test_small_sizes_are_what_the_tests_rest_on() -> None:
    """The clamp is reached, and the window is shorter than the tests' sequences."""
    options = VARIANTS["gpt_oss"][1]
    assert options["swiglu_limit"] < 0.5 and options["sliding_window"] < token_ids().shape[1]
