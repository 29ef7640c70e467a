"""Mistral's tensors have Llama's names; which of them there are, the configuration says."""

from __future__ import annotations

from rtp_llm.models.llama.mapping import mapping

__all__ = ["mapping"]
