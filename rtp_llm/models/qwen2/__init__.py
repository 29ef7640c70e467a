"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.qwen2.config import parse_config
from rtp_llm.models.qwen2.mapping import mapping
from rtp_llm.models.qwen2.model import build, conditions

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build)
