"""Hugging Face's tensor names of RoBERTa and XLM-RoBERTa, with the head of their pre-training."""

from __future__ import annotations

from rtp_llm.models.encoder import EncoderConfig, encoder_mapping
from rtp_llm.plan.rules import Mapping

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
    """Rules for the encoder and its pooler; the head of masked language modelling is skipped."""
    return encoder_mapping(config, _HEADS)
