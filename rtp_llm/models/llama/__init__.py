"""Llama, and what is saved as it (Yi, SmolLM, ...)."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.llama.config import parse_config
from rtp_llm.models.llama.mapping import mapping
from rtp_llm.models.llama.model import build, conditions

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build)
