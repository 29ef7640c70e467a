"""Qwen3."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.qwen3.config import parse_config
from rtp_llm.models.qwen3.mapping import mapping
from rtp_llm.models.qwen3.model import build, conditions

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build)
