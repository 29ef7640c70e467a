"""The back ends other than torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtp_llm.kernels.flashinfer_attention import FUNCTIONS as ATTENTION_FUNCTIONS
from rtp_llm.kernels.flashinfer_attention import FlashInferAttention
from rtp_llm.kernels.flashinfer_kernels import FUNCTIONS, FlashInferKernels
from rtp_llm.kernels.functions import Backend


def _flashinfer(ops: Sequence[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for kind, functions in ((FlashInferKernels, FUNCTIONS), (FlashInferAttention, ATTENTION_FUNCTIONS)):
        own = [op for op in ops if op in functions]
        if own:
            made |= dict.fromkeys(own, kind())
    return made


#: The version that the CUDA platforms ship (arch_config/platforms.bzl), whose signatures are declared here, and that was measured.
FLASHINFER = Backend("flashinfer", "flashinfer-python==0.6.6", {**FUNCTIONS, **ATTENTION_FUNCTIONS}, _flashinfer)
