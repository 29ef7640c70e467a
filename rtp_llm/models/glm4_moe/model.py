"""GLM-4-MoE is a grouped-query decoder with DeepSeek-V3's experts."""

from __future__ import annotations

from rtp_llm.models.moe import build_moe_decoder as build
from rtp_llm.models.moe import moe_conditions as conditions
from rtp_llm.models.moe import moe_layers as experts

__all__ = ["build", "conditions", "experts"]
