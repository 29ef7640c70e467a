"""``config.json`` of Qwen2; defaults are those of transformers' ``Qwen2Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.models.decoder import DecoderConfig, DecoderDefaults, read_decoder, read_layer_windows, read_tied
from rtp_llm.models.reader import config_reader

_DEFAULTS = DecoderDefaults(vocab_size=151936, intermediate_size=22016, max_position_embeddings=32768, kv_heads=32)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Query, key and value always have biases, nothing else has.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    sizes = read_decoder(reader, _DEFAULTS)
    config = replace(sizes, windows=read_layer_windows(reader, sizes.layers), tied=read_tied(reader, names), qkv_bias=True)
    reader.finish()
    return config
