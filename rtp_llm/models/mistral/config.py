"""``config.json`` of Mistral; defaults are those of transformers' ``MistralConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.models.decoder import DecoderConfig, DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.reader import MAX_POSITIONS, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=32000, intermediate_size=14336, max_position_embeddings=131072, kv_heads=8)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """All layers share one window; there are no biases, whatever the configuration says (as in transformers).

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    sizes = read_decoder(reader, _DEFAULTS)
    window = reader.optional_integer("sliding_window", 4096, most=MAX_POSITIONS)
    wanted = "full_attention" if window is None else "sliding_attention"
    types = reader.words("layer_types", sizes.layers, ("full_attention", "sliding_attention"))
    if types is not None and set(types) != {wanted}:
        # That is Ministral, which transformers too runs as another architecture.
        reader.fail("layer_types", f"{wanted} alone, as MistralForCausalLM has one window", fault=ModelFault.UNSUPPORTED_FIELD)
    config = replace(sizes, windows=(window,) * sizes.layers, tied=read_tied(reader, names))
    reader.finish()
    return config
