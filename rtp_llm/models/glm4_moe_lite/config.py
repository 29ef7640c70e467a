"""``config.json`` of GLM-4-MoE-Lite; defaults are those of transformers' ``Glm4MoeLiteConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rtp_llm.models.latent_config import ExpertDefaults, LatentConfig, LatentDefaults, read_latent, read_sparse_layers, sigmoid_config
from rtp_llm.models.reader import config_reader

_DEFAULTS = LatentDefaults(
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    layers=47,
    heads=20,
    max_position_embeddings=202752,
    norm_eps=1e-5,
    nope_dim=192,
    value_dim=256,
)
_EXPERTS = ExpertDefaults(experts=64, top_k=4, shared=1, intermediate_size=1536, scale=1.8)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> LatentConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    reader.only("topk_method", ("noaux_tc",), "the family knows no other")
    reader.only("scoring_func", ("sigmoid",), "the family knows no other")
    sizes = read_latent(reader, _DEFAULTS, interleaved=reader.boolean("rope_interleave", True))
    return sigmoid_config(reader, sizes, names, read_sparse_layers(reader, sizes.layers, 1, listed=True), _EXPERTS)
