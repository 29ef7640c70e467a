"""DeepSeek-V2 is the plain decoder with latent attention, with what its configuration adds."""

from __future__ import annotations

from rtp_llm.models.latent import build_latent as build
from rtp_llm.models.latent import latent_conditions as conditions
from rtp_llm.models.latent import latent_experts as experts

__all__ = ["build", "conditions", "experts"]
