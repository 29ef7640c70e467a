"""gpt-oss."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.gpt_oss.config import parse_config
from rtp_llm.models.gpt_oss.mapping import mapping
from rtp_llm.models.gpt_oss.model import build, conditions, experts

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build, experts=experts)
