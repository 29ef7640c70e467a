"""Tensor names of gpt-oss: Llama's, sinks, and experts stacked and transposed, gate and up in turn."""

from __future__ import annotations

from dataclasses import replace

from rtp_llm.models.llama.mapping import mapping as dense
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, with_moe
from rtp_llm.plan.experts import ExpertNames
from rtp_llm.plan.rules import Mapping, Rule

_SINKS = Rule("model.layers.{}.self_attn.sinks", "layers.{}.attn.sinks")
_NAMES = MoENames(
    router="router.weight",
    bias="router.bias",
    experts=(ExpertNames("model.layers.{}.mlp.experts", transposed=True, alternating=True),),
)


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Rules for just those tensors that the configuration asks for."""
    plain = dense(config.decoder)
    return with_moe(replace(plain, rules=(*plain.rules, _SINKS)), config.moe, _NAMES)
