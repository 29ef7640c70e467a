"""Qwen2-MoE is Qwen2 with experts, and a gated shared expert, in place of most MLPs."""

from __future__ import annotations

from rtp_llm.models.moe import build_moe_decoder as build
from rtp_llm.models.moe import moe_conditions as conditions
from rtp_llm.models.moe import moe_layers as experts

__all__ = ["build", "conditions", "experts"]
