"""``config.json`` of Mixtral; defaults are those of transformers' ``MixtralConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.layers.moe import MoEShape
from rtp_llm.models.decoder import DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.moe import MoEConfig, MoEDecoderConfig, RoutingDefaults, defaulted, read_expert_count, read_routing
from rtp_llm.models.reader import MAX_POSITIONS, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=32000, intermediate_size=14336, max_position_embeddings=131072, kv_heads=8)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> MoEDecoderConfig:
    """Every layer has experts of ``intermediate_size``, and all layers share one window; there are no biases.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(defaulted(raw, rms_norm_eps=1e-5, rope_theta=1e6))
    sizes = read_decoder(reader, _DEFAULTS)
    experts = read_expert_count(reader, "num_local_experts", 8, sizes.layers)
    routing = read_routing(reader, experts, RoutingDefaults("greedy", top_k=2, renormalise=True))
    window = reader.optional_integer("sliding_window", None, most=MAX_POSITIONS)
    decoder = replace(sizes, windows=(window,) * sizes.layers, tied=read_tied(reader, names))
    shape = MoEShape(sizes.hidden_size, sizes.intermediate_size, sizes.act, routing)
    reader.finish()
    return MoEDecoderConfig(decoder, MoEConfig(shape, tuple(range(sizes.layers))))
