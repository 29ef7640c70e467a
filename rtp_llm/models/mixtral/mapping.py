"""Tensor names of Mixtral: Mistral's, and experts as published (``block_sparse_moe``, w1, w3, w2) or as transformers 5 has them."""

from __future__ import annotations

from rtp_llm.models.llama.mapping import mapping as dense
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, with_moe
from rtp_llm.plan.experts import ExpertNames
from rtp_llm.plan.rules import Mapping

_PUBLISHED = MoENames(
    at="model.layers.{}.block_sparse_moe",
    experts=(ExpertNames("model.layers.{}.block_sparse_moe.experts", gate="w1", up="w3", down="w2"),),
)


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Rules for just those tensors that the configuration asks for."""
    return with_moe(dense(config.decoder), config.moe, _PUBLISHED, MoENames())
