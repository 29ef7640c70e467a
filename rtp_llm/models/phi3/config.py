"""``config.json`` of Phi-3; defaults are those of transformers' ``Phi3Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.models.decoder import DecoderConfig, DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.moe import defaulted
from rtp_llm.models.reader import MAX_POSITIONS, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=32064, intermediate_size=8192, max_position_embeddings=4096, partial_rotary=True)
_FIELDS = {"hidden_size": 3072, "rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
#: What older files call LongRoPE.
_LONG = ("su", "yarn")


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """All layers share one window; there are no biases; a part of each head may be rotated.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader({**defaulted(raw, **_FIELDS), **_renamed(raw)})
    sizes = read_decoder(reader, _DEFAULTS)
    if sizes.rope.rope_type not in ("default", "longrope"):
        field = "rope_scaling" if reader.raw.get("rope_scaling") else "rope_parameters"
        reader.fail(field, "rope_type default or longrope, which the family knows", actual=sizes.rope.rope_type)
    window = reader.optional_integer("sliding_window", most=MAX_POSITIONS)
    config = replace(sizes, windows=(window,) * sizes.layers, tied=read_tied(reader, names))
    reader.finish()
    return config


def _renamed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary parameters under the name that LongRoPE has today."""
    found: dict[str, Any] = {}
    for field in ("rope_scaling", "rope_parameters"):
        value = raw.get(field)
        if isinstance(value, Mapping) and value.get("rope_type", value.get("type")) in _LONG:
            found[field] = {**value, "rope_type": "longrope"}
    return found
