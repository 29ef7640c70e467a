"""Hugging Face's tensor names of BERT, with the heads of its pre-training."""

from __future__ import annotations

from rtp_llm.models.encoder import EncoderConfig, encoder_mapping
from rtp_llm.plan.rules import Mapping

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
    """Rules for the encoder and its pooler; the heads of masked language modelling and next sentence prediction are skipped."""
    return encoder_mapping(config, _HEADS)
