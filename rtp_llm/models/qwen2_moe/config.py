"""``config.json`` of Qwen2-MoE; defaults are those of transformers' ``Qwen2MoeConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.layers.moe import MoEShape
from rtp_llm.models.decoder import DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.moe import MoEConfig, MoEDecoderConfig, RoutingDefaults, defaulted, read_expert_count, read_routing, read_stepped_layers
from rtp_llm.models.reader import MAX_POSITIONS, FieldReader, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=151936, intermediate_size=5632, max_position_embeddings=32768, kv_heads=16)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> MoEDecoderConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(defaulted(raw, hidden_size=2048, num_hidden_layers=24, num_attention_heads=16))
    sizes = read_decoder(reader, _DEFAULTS)
    layers = read_stepped_layers(reader, sizes.layers)
    experts = read_expert_count(reader, "num_experts", 60, len(layers))
    routing = read_routing(reader, experts, RoutingDefaults("greedy", top_k=4, renormalise=reader.boolean("norm_topk_prob", False)))
    shape = MoEShape(
        sizes.hidden_size,
        reader.integer("moe_intermediate_size", 1408),
        sizes.act,
        routing,
        shared_size=reader.integer("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    decoder = replace(
        sizes, windows=_windows(reader, sizes.layers), tied=read_tied(reader, names), qkv_bias=reader.boolean("qkv_bias", True)
    )
    reader.finish()
    return MoEDecoderConfig(decoder, MoEConfig(shape, layers))


def _windows(reader: FieldReader, layers: int) -> tuple[int | None, ...]:
    """Without ``layer_types``, every second layer below ``max_window_layers`` has the window, as in transformers, unlike Qwen2."""
    used = reader.boolean("use_sliding_window", False)
    # transformers writes 0 for a window that is not used.
    window = reader.optional_integer("sliding_window", 4096, most=MAX_POSITIONS) if used else None
    types = reader.words("layer_types", layers, ("full_attention", "sliding_attention"))
    if types is None:
        last = reader.integer("max_window_layers", 28, least=0)
        return tuple(window if i < last and i % 2 == 0 else None for i in range(layers))
    if window is None and "sliding_attention" in types:
        expected = "full_attention alone, as use_sliding_window is not set"
        reader.fail("layer_types", expected, fault=ModelFault.BAD_FIELD, actual="sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
