"""gpt-oss."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.gpt_oss.config import parse_config
from rtp_llm.models.moe import MoEDecoderConfig, MoENames, build_moe_decoder, moe_conditions, moe_layers, moe_mapping
from rtp_llm.plan.experts import ExpertNames
from rtp_llm.plan.rules import Mapping

#: Experts are stacked and transposed, gate and up in turn.
_NAMES = MoENames(
    router="router.weight",
    bias="router.bias",
    experts=(ExpertNames("layers.{}.mlp.experts", transposed=True, alternating=True),),
)


def mapping(config: MoEDecoderConfig) -> Mapping:
    """Llama's names, and those of experts."""
    return moe_mapping(config, _NAMES)


FAMILY = Implementation(parse_config, moe_conditions, mapping, build_moe_decoder, moe_layers)
