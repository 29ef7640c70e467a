"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from rtp_llm.models.decoder import build_decoder, decoder_conditions
from rtp_llm.models.decoder_mapping import decoder_mapping
from rtp_llm.models.family import Implementation
from rtp_llm.models.qwen2.config import parse_config

FAMILY = Implementation(parse_config, decoder_conditions, decoder_mapping, build_decoder)
