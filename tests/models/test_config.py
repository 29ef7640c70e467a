"""``config.json`` is read as transformers reads it, and refused, as a whole, where it makes no sense."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, RobertaConfig, XLMRobertaConfig

from rtp_llm.errors import ConfigError
from rtp_llm.layers.rotary import Rotary
from rtp_llm.models import registry
from tests.models.decoders import VARIANTS, configured

IMPLEMENTATIONS = {family.name: family.load() for family in registry.FAMILIES}
DECODERS = {"llama": LlamaConfig, "mistral": MistralConfig, "phi3": Phi3Config, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
ENCODERS = {"bert": BertConfig, "roberta": RobertaConfig, "xlm-roberta": XLMRobertaConfig}


def parse(family: str, raw: dict[str, Any], names: tuple[str, ...] = ()) -> Any:
    return IMPLEMENTATIONS[family].parse_config(raw, names)


def assert_decoder_equals(ours: Any, theirs: Any) -> None:
    """Every field that has a counterpart."""
    same = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "heads": theirs.num_attention_heads,
        "kv_heads": theirs.num_key_value_heads,
        "head_dim": getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        "layers": theirs.num_hidden_layers,
        "act": theirs.hidden_act,
        "norm_eps": theirs.rms_norm_eps,
        "max_position_embeddings": theirs.max_position_embeddings,
        "tied": theirs.tie_word_embeddings,
        "mlp_bias": getattr(theirs, "mlp_bias", False),
        "output_bias": getattr(theirs, "attention_bias", False),
    }
    assert {name: getattr(ours, name) for name in same} == same
    assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope.rope_type == theirs.rope_parameters["rope_type"]
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    assert ours.windows == tuple(window if kind == "sliding_attention" else None for kind in types)


@pytest.mark.parametrize("family", DECODERS)
def test_what_a_decoder_omits_is_what_transformers_takes(family: str) -> None:
    """An empty ``config.json`` gives the defaults of the configuration class."""
    assert_decoder_equals(parse(family, {}), DECODERS[family]())


@pytest.mark.parametrize("family", ENCODERS)
def test_what_an_encoder_omits_is_what_transformers_takes(family: str) -> None:
    """The same for encoders; XLM-RoBERTa differs from RoBERTa in its vocabulary."""
    theirs = ENCODERS[family]()
    ours = parse("roberta" if "roberta" in family else family, {"model_type": theirs.model_type})
    same = {
        "vocab_size": theirs.vocab_size,
        "hidden_size": theirs.hidden_size,
        "intermediate_size": theirs.intermediate_size,
        "layers": theirs.num_hidden_layers,
        "heads": theirs.num_attention_heads,
        "act": theirs.hidden_act,
        "norm_eps": theirs.layer_norm_eps,
        "max_position_embeddings": theirs.max_position_embeddings,
        "type_vocab_size": theirs.type_vocab_size,
        "padding_id": None if family == "bert" else theirs.pad_token_id,
    }
    assert {name: getattr(ours, name) for name in same} == same


@pytest.mark.parametrize("variant", VARIANTS)
def test_saved_configurations_are_read_back(variant: str) -> None:
    """What transformers writes into ``config.json`` is what is read."""
    _, theirs = configured(variant)
    assert_decoder_equals(parse(VARIANTS[variant][0], json.loads(theirs.to_json_string())), theirs)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
SPELLINGS: dict[str, dict[str, Any]] = {
    "theta beside": {"rope_theta": 5e5},
    "null scaling": {"rope_theta": 5e5, "rope_scaling": None},
    "type": {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope_type": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "both types": {"rope_scaling": {"type": "default", "rope_type": "linear", "factor": 2}},
    "theta inside wins": {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "scaling wins": {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "whole number": {"rope_theta": 1000000, "rope_scaling": {"rope_type": "dynamic", "factor": 2}},
    "original inferred": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "original outside": {"original_max_position_embeddings": 256, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "no factor": {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 512}},
    "empty": {"rope_theta": 5e5, "rope_scaling": {}},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rope_spellings_mean_what_they_mean_to_transformers(spelling: str) -> None:
    """Old and new spellings give transformers' tables, at positions beyond the configured ones."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 2048, **SPELLINGS[spelling]}
    ours = Rotary(parse("llama", raw).rope).tables(0, 2100, dtype=torch.float32, device=torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(**json.loads(json.dumps(raw))))(torch.zeros(1), torch.arange(2100)[None])
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference[0], rtol=0, atol=1e-6)


def test_everything_wrong_is_listed_at_once() -> None:
    """Wrong types, signs, contradictions and unknown words: one error, one line each, all naming the file."""
    raw = {
        "vocab_size": "32000",
        "hidden_size": 0,
        "num_hidden_layers": True,
        "num_attention_heads": 12,
        "num_key_value_heads": 5,
        "intermediate_size": -1,
        "hidden_act": "siluu",
        "rms_norm_eps": float("nan"),
        "max_position_embeddings": 1e9,
        "tie_word_embeddings": "yes",
        "attention_bias": 1,
        "head_dim": 7,
        "rope_scaling": {"rope_type": "llama3", "factor": -2, "low_freq_factor": 1},
    }
    with pytest.raises(ConfigError) as caught:
        parse("llama", raw)
    found = sorted(problem.what.removeprefix("field ") for problem in caught.value.problems)
    inside = {"rope_parameters.factor", "rope_parameters.high_freq_factor"}
    assert found == sorted((raw.keys() - {"num_attention_heads", "rope_scaling"}) | inside)
    assert {problem.file for problem in caught.value.problems} == {"config.json"}
    assert "silu, swish" in str(caught.value) and "'siluu'" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "raw", "field"),
    [
        ("llama", {"hidden_size": 100, "num_attention_heads": 12}, "hidden_size"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"vocab_size": 2**40}, "vocab_size"),
        ("llama", {"head_dim": 2**23}, "head_dim"),
        ("llama", {"rope_scaling": {"rope_type": "mrope"}}, "rope_type"),
        ("llama", {"rope_scaling": "linear"}, "rope_scaling"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "full_attention"),
        ("llama", {"rope_theta": 1.0}, "rope_theta"),
        ("llama", {"rope_theta": None}, "rope_theta"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 64}}, "short_factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        ("mistral", {"num_hidden_layers": 1, "layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"num_hidden_layers": 2, "layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["linear_attention"]}, "layer_types"),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "layer_types"),
        ("qwen3", {"head_dim": None}, "head_dim"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_size": 100, "num_attention_heads": 12}, "hidden_size"),
        ("roberta", {"pad_token_id": None}, "pad_token_id"),
        ("roberta", {"pad_token_id": 60000}, "pad_token_id"),
        ("roberta", {"type_vocab_size": 0}, "type_vocab_size"),
    ],
)
def test_what_no_model_can_have_is_refused(family: str, raw: dict[str, Any], field: str) -> None:
    """One bad field, one problem, which names it."""
    with pytest.raises(ConfigError) as caught:
        parse(family, raw)
    assert [problem.what.rpartition(".")[2].removeprefix("field ") for problem in caught.value.problems] == [field]


FIELDS = sorted(
    {name for config in (*DECODERS.values(), *ENCODERS.values()) for name in config().to_dict()}
    | {"rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings", "position_embedding_type"}
)
ROPE_FIELDS = ["type", "rope_type", "rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]
ROPE_FIELDS += ["truncate", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"]
ROPE_FIELDS += ["original_max_position_embeddings"]
KINDS = st.sampled_from(["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"])
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(1, 64) | st.floats() | st.floats(1.0, 100.0) | st.text(max_size=5) | KINDS
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.sampled_from(ROPE_FIELDS), SCALARS | st.lists(SCALARS, max_size=4))
RAW = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
ROPE = st.fixed_dictionaries(
    {"rope_type": KINDS}, optional=dict.fromkeys(ROPE_FIELDS[2:], SCALARS | st.lists(st.floats(0.1, 9), max_size=4))
)


@pytest.mark.parametrize("family", IMPLEMENTATIONS)
@settings(max_examples=150, deadline=None)
@given(raw=RAW)
def test_no_configuration_crashes_the_reader(family: str, raw: dict[str, Any]) -> None:
    """Whatever a file says, it is read or refused with a ConfigError; what is read, the family can plan with."""
    implementation = IMPLEMENTATIONS[family]
    try:
        config = implementation.parse_config({"num_hidden_layers": 2, **raw}, ())
    except ConfigError:
        return
    assert implementation.conditions(config)
    assert implementation.mapping(config, ()).rules


@settings(max_examples=400, deadline=None)
@given(rope=ROPE, theta=st.none() | st.floats(), longest=st.sampled_from([1, 2, 16, 2**31 - 1]))
def test_no_rotary_parameters_crash_the_tables(rope: dict[str, Any], theta: float | None, longest: int) -> None:
    """Rotary parameters are refused, or give tables of the right shape, however odd the numbers are."""
    raw = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": longest, "rope_parameters": rope}
    try:
        config = parse("llama", raw if theta is None else {**raw, "rope_theta": theta})
    except ConfigError:
        return
    cos, sin = Rotary(config.rope).tables(0, 40, dtype=torch.float32, device=torch.device("cpu"))
    assert cos.shape == sin.shape == (40, 8)
