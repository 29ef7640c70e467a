"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""

from __future__ import annotations

from rtp_llm.models.decoder import DecoderConfig, build_decoder, decoder_conditions
from rtp_llm.models.decoder_mapping import decoder_mapping
from rtp_llm.models.family import Implementation
from rtp_llm.models.phi3.config import parse_config
from rtp_llm.plan.rules import Mapping


def mapping(config: DecoderConfig) -> Mapping:
    """Llama's names, with fused matrices."""
    return decoder_mapping(config, fused=True)


FAMILY = Implementation(parse_config, decoder_conditions, mapping, build_decoder)
