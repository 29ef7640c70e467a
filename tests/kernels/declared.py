"""A need of every operation that back ends offer, as models of published sizes have them."""

from __future__ import annotations

import torch

from rtp_llm.kernels.attention import AttentionCall, AttentionNeed, LatentCall, LatentNeed
from rtp_llm.kernels.needs import GateNeed, KernelNeed, NormNeed, RotaryNeed

NEEDS: tuple[KernelNeed, ...] = (
    NormNeed("rms_norm", torch.bfloat16, 4096),
    NormNeed("add_rms_norm", torch.bfloat16, 4096),
    GateNeed("silu_and_mul", torch.bfloat16, 14336),
    RotaryNeed("rotate", torch.bfloat16, 128, 128, False),
    AttentionNeed("attention.prefill", torch.bfloat16, AttentionCall(32, 8, 128, torch.bfloat16)),
    AttentionNeed("attention.decode", torch.bfloat16, AttentionCall(32, 8, 128, torch.bfloat16, window=4096)),
    LatentNeed("mla.decode", torch.bfloat16, LatentCall(128, 512, 64, 0.1, torch.bfloat16), False),
)
