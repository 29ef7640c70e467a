"""GLM-4-MoE-Lite (GLM-4.7-Flash)."""

from __future__ import annotations

from rtp_llm.models.family import Implementation
from rtp_llm.models.glm4_moe_lite.config import parse_config
from rtp_llm.models.latent import build_latent, latent_conditions, latent_experts, latent_mapping

FAMILY = Implementation(parse_config, latent_conditions, latent_mapping, build_latent, latent_experts)
