"""Everything that can be wrong with quantised weights has a message of its own, names the tensor, and stops the load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, build_plan, load_model
from rtp_llm.errors import RtpLlmError
from rtp_llm.quantization.faults import QuantizationError
from tests.quantization.compressed import EVERY
from tests.quantization.formats import FORMATS, Tensors, declare, fp8_blocks, gptq, make
from tests.support.tiny import save_tiny_llama

CPU = LoadConfig(device="cpu")
AT = "model.layers.1.mlp.down_proj"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{AT}.{name}"]

    return change


def turned(tensors: Tensors) -> None:
    tensors[f"{AT}.weight_scale_inv"] = tensors[f"{AT}.weight_scale_inv"].t().contiguous()


def put(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        flat = tensors[f"{AT}.{name}"].view(-1)
        flat[1] = value

    return change


def retyped(name: str, dtype: torch.dtype) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{AT}.{name}"] = tensors[f"{AT}.{name}"].float().to(dtype)

    return change


def plain(*modules: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for module in modules:
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"].float()
            del tensors[f"{module}.weight_scale_inv"]

    return change


def head(tensors: Tensors) -> None:
    encoded, _ = fp8_blocks(torch.float32)(tensors["lm_head.weight"])
    tensors |= {f"lm_head.{name}": tensor for name, tensor in encoded.items()}


def lengthened(tensors: Tensors) -> None:
    tensors[f"{AT}.weight_shape"] = torch.tensor([192, 321])


def other_scale(tensors: Tensors) -> None:
    tensors[f"{K}.weight_scale_inv"] = tensors[f"{K}.weight_scale_inv"].bfloat16()


@dataclass(frozen=True)
class Case:
    """A spoilt checkpoint, the fault and the words that its message must have."""

    form: str
    fault: str
    words: str
    change: Callable[[Tensors], None] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    tp_size: int = 1


CASES = {
    "scale missing": Case("fp8-block", "MISSING_PART", rf"tensor {AT}.weight_scale_inv", without("weight_scale_inv")),
    "scale transposed": Case("fp8-block", "WRONG_GRID", rf"{AT}.weight_scale_inv\): expected \[2, 3\], found \[3, 2\].*exchanged", turned),
    "wrong block size": Case("fp8-block", "WRONG_GRID", "declared are 64 rows.*looks like 96", config={"weight_block_size": [64, 128]}),
    "wrong group size": Case("gptq", "WRONG_GRID", "declared are 64 columns to an element; this looks like 32", config={"group_size": 64}),
    "zero points absent": Case("gptq", "MISSING_PART", rf"{AT}.qzeros.*asymmetric|asymmetric.*{AT}.qzeros", without("qzeros")),
    "group index absent": Case("gptq-order", "MISSING_PART", rf"activation order.*{AT}.g_idx", without("g_idx")),
    "group index out of range": Case("gptq-order", "BAD_INDEX", rf"{AT}.g_idx\): expected 0 to 9, found 0 to 77", put("g_idx", 77)),
    "negative group index": Case("gptq", "BAD_INDEX", rf"{AT}.g_idx\): expected 0 to 9, found -1", put("g_idx", -1)),
    "NaN scale": Case(
        "fp8-block", "BAD_SCALE", rf"{AT}.weight_scale_inv\).*1 of 6 are not, the first is nan", put("weight_scale_inv", float("nan"))
    ),
    "infinite scale": Case("gptq", "BAD_SCALE", rf"{AT}.scales.*inf", put("scales", float("inf"))),
    "weight of another dtype": Case(
        "fp8-block", "CONTRADICTION", rf"{AT}.weight\): expected float8_e4m3fn.*found int8", retyped("weight", torch.int8)
    ),
    "weight of full width with a scale": Case(
        "fp8-block", "CONTRADICTION", "expected float8.*found float16", retyped("weight", torch.float16)
    ),
    "another method's tensors": Case(
        "gptq", "MISSING_PART", "only g_idx, qweight, qzeros, scales", config={"quant_method": "fp8", "sym": None}
    ),
    "declared and plain": Case("fp8-static", "CONTRADICTION", "is declared to be FP8.*and is stored plain", None),
    "excluded and quantised": Case(
        "fp8-block", "CONTRADICTION", "is excluded from quantisation by mlp.down_proj", config={"ignored_layers": ["mlp.down_proj"]}
    ),
    "a quantised head": Case("fp8-block", "UNSUPPORTED_LAYER", "tensor lm_head", head),
    "fused parts disagree": Case("fp8-block", "FUSED_DISAGREE", f"{K}.*: plain|{Q}: plain", plain(Q)),
    "fused scales of two types": Case("fp8-block", "FUSED_DISAGREE", "weight_scale_inv bfloat16", other_scale),
    "group split across ranks": Case("gptq-64", "MISALIGNED", r"tp_size one of \[1\]", tp_size=2),
    "no second zero": Case("awq", "MISSING_PART", rf"{AT}.qzeros", without("qzeros")),
}
if "ct-w4a16" in EVERY:
    CASES |= {
        "codes out of range": Case("ct-w4a8", "BAD_CODE", rf"{AT}.weight\): expected -8 to 7", put("weight", 9)),
        "another shape stated": Case("ct-w4a16", "CONTRADICTION", rf"{AT}.weight_shape\): expected \[192, 320\]", lengthened),
        "static scale missing": Case("ct-fp8-static", "MISSING_PART", rf"{AT}.input_scale", without("input_scale")),
        "e8m0 NaN": Case("ct-mxfp4", "BAD_SCALE", rf"{AT}.weight_scale\)", put("weight_scale", 255)),
        "zero points missing": Case("ct-w4a16-asym", "MISSING_PART", rf"{AT}.weight_zero_point", without("weight_zero_point")),
    }


@pytest.mark.parametrize("name", sorted(CASES))
def test_each_fault_has_its_message(name: str, tmp_path: Path) -> None:
    """Its own code, the tensor, what was expected and found; nothing is loaded."""
    case = CASES[name]
    if case.form == "gptq-64":
        make(FORMATS["gptq"], "llama", tmp_path, encode=gptq(group=64))
        declare(tmp_path, quantization_config=FORMATS["gptq"].config | {"group_size": 64})
    else:
        change = case.change
        if name == "declared and plain":
            change = _plain_static
        make(EVERY[case.form], "llama", tmp_path, change=change)
        if case.config:
            declare(tmp_path, quantization_config=EVERY[case.form].config | case.config)
    parallel = ParallelConfig(tp_size=case.tp_size)
    with pytest.raises(RtpLlmError, match=rf"(?s){case.fault}.*({case.words})") as caught:
        load_model(tmp_path, parallel=parallel, load=CPU)
    assert {problem.code for problem in caught.value.problems} == {case.fault}
    assert all(problem.tensor and problem.file for problem in caught.value.problems)


def _plain_static(tensors: Tensors) -> None:
    tensors[f"{AT}.weight"] = tensors[f"{AT}.weight"].float()
    del tensors[f"{AT}.weight_scale"], tensors[f"{AT}.input_scale"]


def test_all_offenders_are_listed_at_once(tmp_path: Path) -> None:
    """Two lost scales, a weight of another type: three problems in one error."""

    def change(tensors: Tensors) -> None:
        without("weight_scale_inv")(tensors)
        del tensors[f"{Q}.weight_scale_inv"]
        tensors[f"{K}.weight"] = tensors[f"{K}.weight"].float().to(torch.int8)

    make(FORMATS["fp8-block"], "llama", tmp_path, change=change)
    with pytest.raises(QuantizationError) as caught:
        build_plan(tmp_path, load=CPU)
    assert [(p.code, p.tensor) for p in caught.value.problems] == [
        ("CONTRADICTION", f"{K}.weight"),
        ("MISSING_PART", f"{Q}.weight_scale_inv"),
        ("MISSING_PART", f"{AT}.weight_scale_inv"),
    ]


def test_a_scale_that_belongs_to_nothing_is_unexpected(tmp_path: Path) -> None:
    """A norm has no scale: the tensor is refused, not dropped."""

    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight_scale_inv"] = torch.ones(1)

    make(FORMATS["fp8-block"], "llama", tmp_path, change=change)
    with pytest.raises(QuantizationError, match="UNSUPPORTED_LAYER.*model.norm"):
        build_plan(tmp_path, load=CPU)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"quant_method": "aqlm", "nbits": 2}, "UNKNOWN_METHOD.*expected one of awq, compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "UNSUPPORTED_SCHEME.*GPTQ or AWQ"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": [["a"]]}, "BAD_DECLARATION.*modules_to_not_convert"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "CONTRADICTION.*no tensor is"),
        ({"quant_method": ["fp8"]}, "UNKNOWN_METHOD"),
        ("fp8", "activation|plain|no tensor is"),
        ({"bits": 4}, "UNKNOWN_METHOD"),
        ({"quant_method": "fp8", "fmt": "e5m2", "activation_scheme": "odd"}, "2 problems(?s:.*)activation_scheme(?s:.*)fmt"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "BAD_DECLARATION.*weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "BAD_DECLARATION.*weight_block_size"),
        ({"quant_method": "fp8", "ignored_layers": [["a"]]}, "BAD_DECLARATION.*ignored_layers"),
        (
            {"quant_method": "gptq", "bits": 3},
            r"UNSUPPORTED_SCHEME.*bits: expected one of 4, 8, found 3|bits.*expected one of 4, 8, found 3",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": -5}, "BAD_DECLARATION.*group_size"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "UNSUPPORTED_SCHEME.*version"),
        ({"quant_method": "compressed-tensors"}, "BAD_DECLARATION.*config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": 5}}, "BAD_DECLARATION.*group_0"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "strategy": "group"}}},
            },
            "UNSUPPORTED_SCHEME.*strategy.*float4",
        ),
        ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse"}, "config_groups": {}}, "sparsity_config"),
        ({"quant_method": "compressed-tensors", "ignore": ["re:("], "config_groups": {}}, "BAD_DECLARATION.*regular expression"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "UNSUPPORTED_SCHEME.*quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "BAD_DECLARATION.*quantized_layers"),
        ({"quant_method": "quark"}, "BAD_DECLARATION.*global_quant_config"),
        ({"quant_method": "quark", "global_quant_config": {"weight": [{}, {}]}}, "UNSUPPORTED_SCHEME.*two levels"),
    ],
)
def test_declarations_are_read_without_trust(declared: Any, words: str, tmp_path: Path) -> None:
    """An unknown method, an unsupported scheme of a known one, fields of any other form: refused, with what would be right."""
    folder = save_tiny_llama(tmp_path / "model")
    declare(folder, quantization_config=declared)
    with pytest.raises(QuantizationError, match=words):
        build_plan(folder, load=CPU)


def test_the_setting_must_be_what_the_checkpoint_is(tmp_path: Path) -> None:
    """``--quantization`` chooses nothing: it holds the checkpoint to a method, or makes FP8 of plain weights, and says which."""
    plain_folder = save_tiny_llama(tmp_path / "plain")
    make(FORMATS["gptq"], "llama", tmp_path / "gptq")
    for folder, method, words in (
        (plain_folder, "fp8", "found no quantisation.*inline-fp8"),
        (tmp_path / "gptq", "awq", "expected awq, found gptq"),
        (tmp_path / "gptq", "inline-fp8-tensor", "expected inline-fp8-tensor, found gptq"),
    ):
        with pytest.raises(QuantizationError, match=words):
            build_plan(folder, load=LoadConfig(device="cpu", quantization=method))
    assert not build_plan(tmp_path / "gptq", load=LoadConfig(device="cpu", quantization="gptq")).problems


def test_two_declarations_must_agree(tmp_path: Path) -> None:
    """The text model's own declaration counts; a second one that says something else is refused."""
    make(FORMATS["fp8-block"], "llama", tmp_path)
    declared = FORMATS["fp8-block"].config
    declare(tmp_path, quantization_config=None, text_config={"quantization_config": declared})
    assert not build_plan(tmp_path, load=CPU).problems
    declare(tmp_path, quantization_config=declared | {"weight_block_size": [64, 64]})
    with pytest.raises(QuantizationError, match="declared more than once"):
        build_plan(tmp_path, load=CPU)
