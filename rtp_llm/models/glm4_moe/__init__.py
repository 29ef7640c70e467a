"""GLM-4-MoE (GLM-4.5 and its kin)."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.glm4_moe.config import parse_config
from rtp_llm.models.glm4_moe.mapping import mapping
from rtp_llm.models.glm4_moe.model import build, conditions, experts

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build, experts=experts)
