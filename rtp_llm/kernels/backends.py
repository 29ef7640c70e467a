"""The back ends that there are beside torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rtp_llm.kernels.flashinfer_kernels import OFFERS, FlashInferKernels
from rtp_llm.kernels.offers import Backend


def _flashinfer(ops: Sequence[str]) -> dict[str, Any]:
    kernels = FlashInferKernels()
    return {op: kernels for op in ops if op in OFFERS}


#: The version that the CUDA platforms ship (arch_config/platforms.bzl) and that what is called was read in and measured with.
FLASHINFER = Backend("flashinfer", "flashinfer-python==0.6.6", OFFERS, _flashinfer)
