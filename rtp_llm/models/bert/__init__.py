"""BERT."""

from __future__ import annotations

from rtp_llm.models.bert.config import parse_config
from rtp_llm.models.bert.mapping import mapping
from rtp_llm.models.bert.model import build, conditions
from rtp_llm.models.family import Implementation

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build)
