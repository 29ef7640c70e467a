"""gpt-oss is a grouped-query decoder with sinks, and with experts, biases and all, in place of MLPs."""

from __future__ import annotations

from rtp_llm.models.moe import build_moe_decoder as build
from rtp_llm.models.moe import moe_conditions as conditions
from rtp_llm.models.moe import moe_layers as experts

__all__ = ["build", "conditions", "experts"]
