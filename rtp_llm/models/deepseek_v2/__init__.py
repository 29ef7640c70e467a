"""DeepSeek-V2 and what is saved as it."""

from __future__ import annotations

from rtp_llm.models.deepseek_v2.config import parse_config
from rtp_llm.models.family import Implementation
from rtp_llm.models.latent import build_latent, latent_conditions, latent_experts, latent_mapping

FAMILY = Implementation(parse_config, latent_conditions, latent_mapping, build_latent, latent_experts)
