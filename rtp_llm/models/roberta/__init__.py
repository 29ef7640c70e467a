"""RoBERTa and XLM-RoBERTa."""

from __future__ import annotations

from rtp_llm.models.encoder import EncoderConfig, build_encoder, encoder_conditions, encoder_mapping
from rtp_llm.models.family import Implementation
from rtp_llm.models.prefixes import encoder_prefixes
from rtp_llm.models.roberta.config import parse_config
from rtp_llm.plan.rules import Mapping

#: The heads of masked language modelling, which are skipped.
_HEADS = (
    "lm_head.bias",
    "lm_head.decoder.bias",
    "lm_head.decoder.weight",
    "lm_head.dense.bias",
    "lm_head.dense.weight",
    "lm_head.layer_norm.bias",
    "lm_head.layer_norm.weight",
)


def mapping(config: EncoderConfig) -> Mapping:
    """The encoder and its pooler; the head is skipped."""
    return encoder_mapping(config, _HEADS)


FAMILY = Implementation(parse_config, encoder_conditions, mapping, build_encoder, prefixes=encoder_prefixes("roberta.", "lm_head"))
