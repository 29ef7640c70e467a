"""RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.roberta.config import parse_config
from rtp_llm.models.roberta.mapping import mapping
from rtp_llm.models.roberta.model import build, conditions

FAMILY = Implementation(parse_config=parse_config, conditions=conditions, mapping=mapping, build=build)
