"""What flashinfer's kernels are given, as far as that can be seen without a GPU: shapes, strides and addresses that they trust."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rtp_llm.kernels import flashinfer_kernels
from rtp_llm.kernels.flashinfer_kernels import FlashInferKernels
from rtp_llm.kernels.symbols import Symbol, called
from rtp_llm.kernels.torch_kernels import TORCH


def check(x: torch.Tensor) -> None:
    """What ``CHECK_LAST_DIM_CONTIGUOUS_INPUT`` asks for, and what vector loads take for granted."""
    assert x.dim() in (2, 3) and x.stride(-1) == 1
    assert all(stride % 8 == 0 for stride in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def rmsnorm(input: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    check(input)
    return torch.empty_like(input).copy_(TORCH.rms_norm(input, weight, eps))


def fused_add_rmsnorm(input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    assert input.dim() == residual.dim() == 2
    normed, total = TORCH.add_rms_norm(input, residual, weight, eps)
    input.copy_(normed)
    residual.copy_(total)


def silu_and_mul(input: torch.Tensor) -> torch.Tensor:
    assert input.is_contiguous()
    return TORCH.silu_and_mul(input)


def apply_rope_with_cos_sin_cache(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, cos_sin_cache: torch.Tensor, is_neox: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    assert cos_sin_cache.dtype == torch.float32 and cos_sin_cache.is_contiguous() and positions.dtype == torch.int64
    check(query)
    check(key)
    assert query.shape[-1] == key.shape[-1] == head_size
    cos, sin = (part.repeat(1, 2) for part in cos_sin_cache[positions].chunk(2, dim=-1))
    return TORCH.rotate(query, key, (cos, sin), not is_neox)


#: Each states what the kernel behind the name assumes of its arguments, and computes it by torch: a CPU cannot run the kernel.
_STAND_INS = {f.__name__: f for f in (rmsnorm, fused_add_rmsnorm, silu_and_mul, apply_rope_with_cos_sin_cache)}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FlashInferKernels:
    def stand_in(symbol: Symbol) -> Any:
        called(symbol)  # it is there
        return _STAND_INS[symbol.name]

    monkeypatch.setattr(flashinfer_kernels, "called", stand_in)
    return FlashInferKernels()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 3, 4, 64)])
def test_norms_of_any_number_of_dimensions(kernels: FlashInferKernels, shape: tuple[int, ...]) -> None:
    """Rows are flattened and come back as they were."""
    x, residual, weight = randn(*shape), randn(*shape), randn(64)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-6), TORCH.rms_norm(x, weight, 1e-6))
    wanted = TORCH.add_rms_norm(x, residual, weight, 1e-6)
    assert all(map(torch.equal, kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6), wanted))


@pytest.mark.parametrize(("width", "first"), [(96, 8), (96, 3), (99, 8), (99, 0)])
def test_rows_and_heads_that_lie_apart(kernels: FlashInferKernels, width: int, first: int) -> None:
    """What is cut out of a wider product is taken as it lies where a thread can load it, and copied where it cannot."""
    weight = randn(64)
    rows = randn(7, width)[:, first : first + 64]
    assert torch.equal(kernels.rms_norm(rows, weight, 1e-6), TORCH.rms_norm(rows, weight, 1e-6))
    heads = randn(7, 3 * width)[:, first : first + 128].unflatten(-1, (2, 64))
    assert torch.equal(kernels.rms_norm(heads, weight, 1e-6), TORCH.rms_norm(heads, weight, 1e-6))
    gate_up = randn(7, width)[:, first : first + 64]
    assert torch.equal(kernels.silu_and_mul(gate_up), TORCH.silu_and_mul(gate_up))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [64, 32])
def test_rotation(kernels: FlashInferKernels, rotary: int, interleaved: bool) -> None:
    """Half of each table, side by side in float32; each token has its own row; queries and keys out of one product."""
    q, k = (part.unflatten(-1, (-1, 64)) for part in randn(5, 6 * 64).split((4 * 64, 2 * 64), dim=-1))
    angles = torch.rand(5, rotary // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    found = kernels.rotate(q, k, kernels.rotary_tables(cos, sin), interleaved)
    assert all(map(torch.equal, found, TORCH.rotate(q, k, (cos, sin), interleaved)))
