"""Kimi Linear: layers with delta attention or latent attention, without rotation."""

from __future__ import annotations

import torch
from torch import nn

from rtp_llm.layers.kda import KimiDeltaAttention
from rtp_llm.layers.mla import MultiHeadLatentAttention
from rtp_llm.layers.transformer import CausalLM
from rtp_llm.models.kimi_linear.config import KimiConfig
from rtp_llm.models.latent import build_latent, latent_conditions
from rtp_llm.parallel.experts import ExpertLayers
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility


def conditions(config: KimiConfig) -> tuple[Divisibility, ...]:
    """Heads of both kinds and intermediate sizes are split over the ranks."""
    return (*latent_conditions(config.latent), Divisibility("linear attention heads", config.kda.heads))


def experts(config: KimiConfig) -> ExpertLayers | None:
    """The experts to divide between expert-parallel ranks."""
    return config.latent.moe.experts


def build(config: KimiConfig, groups: Groups, dtype: torch.dtype) -> CausalLM:
    """The model of one rank, on the meta device."""

    def attention(layer: int) -> nn.Module:
        slot, tp = f"layers.{layer}.attn", groups.tp
        if layer in config.linear:
            return KimiDeltaAttention(slot, config.kda, layer=layer, tp=tp, dtype=dtype)
        return MultiHeadLatentAttention(slot, config.latent.sizes.attention, layer=layer, tp=tp, dtype=dtype)

    return build_latent(config.latent, groups, dtype, attention=attention)
