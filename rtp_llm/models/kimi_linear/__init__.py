"""Kimi Linear."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.kimi_linear.config import parse_config
from rtp_llm.models.kimi_linear.mapping import mapping
from rtp_llm.models.kimi_linear.model import build, conditions, experts

FAMILY = Implementation(parse_config, conditions, mapping, build, experts)
