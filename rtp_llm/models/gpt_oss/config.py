"""``config.json`` of gpt-oss; defaults are those of transformers' ``GptOssConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.layers.activation import ClampedGate
from rtp_llm.layers.moe import MoEShape
from rtp_llm.models.decoder import DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.moe import MoEConfig, MoEDecoderConfig, RoutingDefaults, defaulted, read_expert_count, read_routing
from rtp_llm.models.reader import MAX_POSITIONS, FieldReader, config_reader

_DEFAULTS = DecoderDefaults(
    vocab_size=201088, intermediate_size=2880, max_position_embeddings=131072, kv_heads=8, head_dim=64, head_dim_may_be_null=False
)
_FIELDS = {"hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}
#: The default rotation.
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> MoEDecoderConfig:
    """Every layer has experts of ``intermediate_size``.  By default every second layer, from the first on, has the window.
    ``attention_bias`` is for all four projections.

    Raises:
        ConfigError: with every bad field.
    """
    unsaid = raw.get("rope_parameters") is None and not raw.get("rope_scaling")
    reader = config_reader({**defaulted(raw, **_FIELDS), **({"rope_parameters": _YARN} if unsaid else {})})
    sizes = read_decoder(reader, _DEFAULTS)
    reader.only("hidden_act", ("silu",), "the experts of this architecture have no other activation")
    experts = read_expert_count(reader, "num_local_experts", 128, sizes.layers)
    routing = read_routing(reader, experts, RoutingDefaults("greedy", top_k=4, renormalise=True, biased=True))
    gate = ClampedGate(reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0))
    attention_bias = reader.boolean("attention_bias", True)
    decoder = replace(
        sizes,
        windows=_windows(reader, sizes.layers),
        tied=read_tied(reader, names),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        sinks=True,
    )
    shape = MoEShape(sizes.hidden_size, sizes.intermediate_size, sizes.act, routing, alternating=gate, bias=True)
    reader.finish()
    return MoEDecoderConfig(decoder, MoEConfig(shape, tuple(range(sizes.layers))))


def _windows(reader: FieldReader, layers: int) -> tuple[int | None, ...]:
    window = reader.optional_integer("sliding_window", 128, most=MAX_POSITIONS)
    types = reader.words("layer_types", layers, ("full_attention", "sliding_attention"))
    if types is None:
        types = tuple("full_attention" if i % 2 else "sliding_attention" for i in range(layers))
    if window is None and "sliding_attention" in types:
        reader.fail("sliding_window", "a number of tokens, as some layers have a window", fault=ModelFault.ABSENT_FIELD)
    return tuple(window if kind == "sliding_attention" else None for kind in types)
