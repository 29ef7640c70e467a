"""Llama is the plain decoder: grouped-query attention, gated MLP, RMS norms."""

from __future__ import annotations

from rtp_llm.models.decoder import build_decoder as build
from rtp_llm.models.decoder import decoder_conditions as conditions

__all__ = ["build", "conditions"]
