"""Qwen3-MoE."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, build_moe_decoder, moe_conditions, moe_layers, moe_mapping
from rtp_llm.models.qwen3_moe.config import parse_config
from rtp_llm.plan.rules import Mapping


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Llama's names, and those of experts."""
    return moe_mapping(config, MoENames())


FAMILY = Implementation(parse_config, moe_conditions, mapping, build_moe_decoder, moe_layers)
