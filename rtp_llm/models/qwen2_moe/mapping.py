"""Tensor names of Qwen2-MoE: Qwen2's, and experts one by one, as published, or stacked."""

from __future__ import annotations

from rtp_llm.models.llama.mapping import mapping as dense
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, with_moe
from rtp_llm.plan.rules import Mapping

_NAMES = MoENames(shared="shared_expert", shared_gate="shared_expert_gate")


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Rules for just those tensors that the configuration asks for."""
    return with_moe(dense(config.decoder), config.moe, _NAMES)
