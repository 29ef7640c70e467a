"""``config.json`` of Llama; defaults are those of transformers' ``LlamaConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.models.decoder import DecoderConfig, DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.reader import config_reader

_DEFAULTS = DecoderDefaults(vocab_size=32000, intermediate_size=11008, max_position_embeddings=2048)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    sizes = read_decoder(reader, _DEFAULTS)
    attention_bias = reader.boolean("attention_bias", False)
    config = replace(
        sizes,
        tied=read_tied(reader, names),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=reader.boolean("mlp_bias", False),
    )
    reader.finish()
    return config
