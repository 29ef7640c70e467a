"""GLM-4-MoE-Lite (GLM-4.7-Flash)."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.glm4_moe_lite.config import parse_config
from rtp_llm.models.glm4_moe_lite.mapping import mapping
from rtp_llm.models.glm4_moe_lite.model import build, conditions, experts

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build, experts=experts)
