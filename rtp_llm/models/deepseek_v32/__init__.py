"""DeepSeek-V3.2."""

from __future__ import annotations

from rtp_llm.models.deepseek_v32.config import parse_config
from rtp_llm.models.deepseek_v32.mapping import mapping
from rtp_llm.models.deepseek_v32.model import build, conditions, experts
from rtp_llm.models.family import Implementation

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build, experts=experts)
