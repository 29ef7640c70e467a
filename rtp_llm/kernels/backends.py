"""The back ends that there are beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtp_llm.kernels.flashinfer_attention import OFFERS as ATTENTION_OFFERS
from rtp_llm.kernels.flashinfer_attention import FlashInferAttention
from rtp_llm.kernels.flashinfer_kernels import OFFERS, FlashInferKernels
from rtp_llm.kernels.offers import Backend


def _flashinfer(ops: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for kind, offers in ((FlashInferKernels, OFFERS), (FlashInferAttention, ATTENTION_OFFERS)):
        own = [op for op in ops if op in offers]
        if own:
            made |= dict.fromkeys(own, kind())
    return made


#: The version that the CUDA platforms ship (arch_config/platforms.bzl) and that what is called was read in and measured with.
FLASHINFER = Backend("flashinfer", "flashinfer-python==0.6.6", {**OFFERS, **ATTENTION_OFFERS}, _flashinfer)
