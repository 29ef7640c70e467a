"""GLM-4-MoE-Lite's tensors have the names of all families with latent attention; which of them there are, the configuration says."""

from __future__ import annotations

from rtp_llm.models.latent import mapping

__all__ = ["mapping"]
