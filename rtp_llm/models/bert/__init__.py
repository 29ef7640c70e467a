"""BERT."""

from __future__ import annotations

from rtp_llm.models.bert.config import parse_config
from rtp_llm.models.encoder import EncoderConfig, build_encoder, encoder_conditions, encoder_mapping
from rtp_llm.models.family import Implementation
from rtp_llm.models.prefixes import encoder_prefixes
from rtp_llm.plan.rules import Mapping

#: The heads of masked language modelling and next sentence prediction, which are skipped.
_HEADS = (
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.transform.LayerNorm.beta",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.dense.weight",
    "cls.seq_relationship.bias",
    "cls.seq_relationship.weight",
)


def mapping(config: EncoderConfig) -> Mapping:
    """The encoder and its pooler; heads are skipped."""
    return encoder_mapping(config, _HEADS)


FAMILY = Implementation(parse_config, encoder_conditions, mapping, build_encoder, prefixes=encoder_prefixes("bert.", "cls"))
