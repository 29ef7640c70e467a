"""torch's operations against float64, written down anew from the papers."""

from __future__ import annotations

import pytest
import torch

from rtp_llm.kernels.torch_kernels import TORCH

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms(dtype: torch.dtype) -> None:
    """``x / sqrt(mean(x^2) + eps) * weight``, of rows of any number of dimensions; with a residual, its sum as well."""
    x, residual, weight = (torch.randn(*shape, dtype=dtype) for shape in ((2, 3, 40), (2, 3, 40), (40,)))

    def norm(of: torch.Tensor) -> torch.Tensor:
        return of / (of.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()

    close(TORCH.rms_norm(x, weight, 1e-3), norm(x.double()), dtype)
    normed, total = TORCH.add_rms_norm(x.clone(), residual.clone(), weight, 1e-3)
    close(total, x.double() + residual.double(), dtype)
    close(normed, norm(x.double() + residual.double()), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(dtype: torch.dtype) -> None:
    """``g * sigmoid(g) * u`` of the two halves."""
    x = torch.randn(2, 5, 24, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    close(TORCH.silu_and_mul(x), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [16, 8])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation_is_multiplication_of_complex_numbers(dtype: torch.dtype, rotary: int, interleaved: bool) -> None:
    """Each pair turns by its angle; what is beyond ``rot`` passes; scores of queries and keys are those of the reference."""
    q, k = torch.randn(7, 4, 16, dtype=dtype), torch.randn(7, 2, 16, dtype=dtype)
    angles = torch.rand(7, rotary // 2, dtype=torch.float64) * 6
    cos, sin = (f(angles).repeat(1, 2).to(dtype) for f in (torch.cos, torch.sin))
    turned = TORCH.rotate(q, k, TORCH.rotary_tables(cos, sin), interleaved)
    wanted = [reference(x.double(), cos.double(), sin.double(), interleaved) for x in (q, k)]
    for found, want in zip(turned, wanted, strict=True):
        close(found, want, dtype)


def reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Pairs as complex numbers; in the order in which torch's back end leaves them: first elements, then second ones."""
    rotary = cos.shape[-1]
    pairs = x[..., :rotary].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    turn = torch.complex(cos[:, None, : rotary // 2], sin[:, None, : rotary // 2])
    turned = torch.view_as_complex(pairs.contiguous()) * turn
    return torch.cat((turned.real, turned.imag, x[..., rotary:]), dim=-1)


def test_wide_tables_are_computed_with_in_their_own_dtype() -> None:
    """float32 tables and bfloat16 heads: the product is float32, and rounded once."""
    q = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    cos, sin = torch.randn(3, 8), torch.randn(3, 8)
    found, _ = TORCH.rotate(q, q, (cos, sin), False)
    wanted, _ = TORCH.rotate(q.float(), q.float(), (cos, sin), False)
    assert torch.equal(found, wanted.bfloat16())
