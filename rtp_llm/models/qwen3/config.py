"""``config.json`` of Qwen3; defaults are those of transformers' ``Qwen3Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.models.decoder import DecoderConfig, DecoderDefaults, read_decoder, read_layer_windows, read_tied
from rtp_llm.models.reader import config_reader

_DEFAULTS = DecoderDefaults(
    vocab_size=151936,
    intermediate_size=22016,
    max_position_embeddings=32768,
    kv_heads=32,
    head_dim=128,
    head_dim_may_be_null=False,
)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Every query and key head has an RMS norm; ``attention_bias`` is for all four projections.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    sizes = read_decoder(reader, _DEFAULTS)
    attention_bias = reader.boolean("attention_bias", False)
    config = replace(
        sizes,
        windows=read_layer_windows(reader, sizes.layers),
        tied=read_tied(reader, names),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        head_norms=True,
    )
    reader.finish()
    return config
