"""The back ends that there are beside torch."""

from __future__ import annotations

from rtp_llm.kernels.flashinfer_kernels import OFFERS, FlashInferKernels
from rtp_llm.kernels.offers import Backend

#: The version that the CUDA platforms ship (arch_config/platforms.bzl) and that what is called was read in and measured with.
FLASHINFER = Backend("flashinfer", "flashinfer-python==0.6.6", OFFERS, FlashInferKernels)
