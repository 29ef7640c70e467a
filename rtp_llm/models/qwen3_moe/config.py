"""``config.json`` of Qwen3-MoE; defaults are those of transformers' ``Qwen3MoeConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.layers.moe import MoEShape
from rtp_llm.models.decoder import DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.moe import MoEConfig, MoEDecoderConfig, RoutingDefaults, defaulted, read_expert_count, read_routing, read_stepped_layers
from rtp_llm.models.reader import MAX_POSITIONS, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=151936, intermediate_size=6144, max_position_embeddings=32768, kv_heads=4)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> MoEDecoderConfig:
    """Every query and key head has an RMS norm; all layers share one window; ``attention_bias`` is for all four projections.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(defaulted(raw, hidden_size=2048, num_hidden_layers=24))
    sizes = read_decoder(reader, _DEFAULTS)
    layers = read_stepped_layers(reader, sizes.layers)
    # transformers 5 writes the count under the second name.
    count = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = read_expert_count(reader, count, 128, len(layers))
    routing = read_routing(reader, experts, RoutingDefaults("greedy", top_k=8, renormalise=reader.boolean("norm_topk_prob", False)))
    if "num_experts" in raw and raw.get("num_local_experts", raw["num_experts"]) != raw["num_experts"]:
        reader.fail("num_local_experts", "the same as num_experts")
    attention_bias = reader.boolean("attention_bias", False)
    used = reader.boolean("use_sliding_window", False)
    window = reader.optional_integer("sliding_window", 4096, most=MAX_POSITIONS) if used else None
    decoder = replace(
        sizes,
        windows=(window,) * sizes.layers,
        tied=read_tied(reader, names),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        head_norms=True,
    )
    shape = MoEShape(sizes.hidden_size, reader.integer("moe_intermediate_size", 768), sizes.act, routing)
    reader.finish()
    return MoEDecoderConfig(decoder, MoEConfig(shape, layers))
