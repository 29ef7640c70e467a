"""GLM-4-MoE (GLM-4.5 and its kin)."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.glm4_moe.config import parse_config
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, build_moe_decoder, moe_conditions, moe_layers, moe_mapping
from rtp_llm.plan.rules import Mapping

_NAMES = MoENames(bias="gate.e_score_correction_bias", shared="shared_experts")


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Llama's names, and those of experts."""
    return moe_mapping(config, _NAMES)


FAMILY = Implementation(parse_config, moe_conditions, mapping, build_moe_decoder, moe_layers)
