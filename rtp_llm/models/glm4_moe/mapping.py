"""Tensor names of GLM-4-MoE: Llama's, and experts one by one, as published, or stacked."""

from __future__ import annotations

from rtp_llm.models.llama.mapping import mapping as dense
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, mtp_skip, with_moe
from rtp_llm.plan.rules import Mapping

_NAMES = MoENames(bias="gate.e_score_correction_bias", shared="shared_experts")


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Rules for just those tensors that the configuration asks for; layers for multi-token prediction are skipped."""
    return with_moe(dense(config.decoder), config.moe, _NAMES, skipped_layers=mtp_skip(config.decoder.layers, config.mtp_layers))
