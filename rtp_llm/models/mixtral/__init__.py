"""Mixtral."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.mixtral.config import parse_config
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, build_moe_decoder, moe_conditions, moe_layers, moe_mapping
from rtp_llm.plan.experts import ExpertNames
from rtp_llm.plan.rules import Mapping

#: As published; transformers 5 has the names of other families.
_PUBLISHED = MoENames(
    at="layers.{}.block_sparse_moe",
    experts=(ExpertNames("layers.{}.block_sparse_moe.experts", gate="w1", up="w3", down="w2"),),
)


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Llama's names, and those of experts."""
    return moe_mapping(config, _PUBLISHED, MoENames())


FAMILY = Implementation(parse_config, moe_conditions, mapping, build_moe_decoder, moe_layers)
