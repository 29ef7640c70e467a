"""RoBERTa is the plain encoder."""

from __future__ import annotations

from rtp_llm.models.encoder import build_encoder as build
from rtp_llm.models.encoder import encoder_conditions as conditions

__all__ = ["build", "conditions"]
