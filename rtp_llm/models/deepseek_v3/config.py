"""``config.json`` of DeepSeek-V3; defaults are those of transformers' ``DeepseekV3Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rtp_llm.models.latent_config import ExpertDefaults, LatentConfig, LatentDefaults, read_latent, read_sparse_layers, sigmoid_config
from rtp_llm.models.reader import config_reader

_DEFAULTS = LatentDefaults(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    layers=61,
    heads=128,
    max_position_embeddings=4096,
    norm_eps=1e-6,
)
_EXPERTS = ExpertDefaults(experts=256, top_k=8, shared=1, intermediate_size=2048, scale=2.5, groups=8, top_groups=4)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> LatentConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    reader.only("topk_method", ("noaux_tc",), "that is DeepSeek-V2's")
    reader.only("scoring_func", ("sigmoid",), "that is DeepSeek-V2's")
    sizes = read_latent(reader, _DEFAULTS, interleaved=reader.boolean("rope_interleave", True))
    return sigmoid_config(reader, sizes, names, read_sparse_layers(reader, sizes.layers, 3), _EXPERTS)
