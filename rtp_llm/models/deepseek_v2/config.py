"""``config.json`` of DeepSeek-V2; defaults are those of transformers' ``DeepseekV2Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from rtp_llm.models.faults import ModelFault
from rtp_llm.models.latent_config import (
    ExpertDefaults,
    LatentConfig,
    LatentDefaults,
    latent_config,
    read_experts,
    read_latent,
    read_sparse_layers,
)
from rtp_llm.models.moe import RoutingMethod
from rtp_llm.models.reader import config_reader

_DEFAULTS = LatentDefaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    layers=32,
    heads=32,
    max_position_embeddings=2048,
    norm_eps=1e-6,
)
_EXPERTS = ExpertDefaults(experts=64, top_k=1, shared=2, intermediate_size=1407, scale=1.0)
#: The ways of choosing experts, by the names that ``topk_method`` has for them.
_METHODS: Mapping[str, RoutingMethod] = MappingProxyType({"greedy": "greedy", "group_limited_greedy": "group_limited_greedy"})


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> LatentConfig:
    """The rotation is computed in float32, as in transformers (and for this family only).

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    reader.only("mlp_bias", (False,), "published models have none")
    reader.only("scoring_func", ("softmax",), "that is DeepSeek-V3's")
    reader.only("norm_topk_prob", (False,), "the published code then leaves out routed_scaling_factor, transformers does not renormalise")
    sizes = read_latent(reader, _DEFAULTS)
    layers = read_sparse_layers(reader, sizes.layers, 0)
    method = _METHODS[reader.choice("topk_method", "greedy", _METHODS)]
    if raw.get("num_experts_per_tok") is None:
        reader.fail("num_experts_per_tok", "how many experts a token goes to", fault=ModelFault.ABSENT_FIELD)
    moe = read_experts(reader, sizes, layers, method, _EXPERTS)
    return latent_config(reader, sizes, moe, names, wide_rotary=True)
