"""Kimi delta attention against its definition in float64, one token at a time; and a cache that keeps states."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_llm.layers.kda import CHUNK, ForgetGate, KDAShape, ShortConvolution, delta_rule


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule as the paper states it: decay, correct what is recalled for the key, read with the query."""
    outs = []
    for t in range(q.shape[2]):
        state = torch.einsum("bhk,bhkv->bhkv", decay[:, :, t].exp(), state)
        error = v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, :, t], k[:, :, t], error)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    return torch.stack(outs, dim=2), state


def inputs(tokens: int, dim: int, seed: int, strongest: float) -> tuple[torch.Tensor, ...]:
    """Random inputs of float64; keys of length one, decays from none at all to ``strongest`` a token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(2, 3, *shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(tokens, dim), dim=-1)
    decay = -strongest * torch.rand(2, 3, tokens, dim, generator=generator, dtype=torch.float64)
    decay[..., 0] = 0
    beta = torch.rand(2, 3, tokens, generator=generator, dtype=torch.float64)
    return normal(tokens, dim), k, normal(tokens, dim), decay, beta, normal(dim, dim)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 3 * CHUNK), dim=st.integers(1, 9), seed=st.integers(0, 2**16), strongest=st.sampled_from([0.0, 0.1, 5.0, 200.0])
)
def test_chunks_are_the_recurrence(tokens: int, dim: int, seed: int, strongest: float) -> None:
    """In float64 equal to rounding for every length, however fast the state decays; the state handed in stays as it was."""
    given_ = inputs(tokens, dim, seed, strongest)
    before = given_[-1].clone()
    out, state = delta_rule(*given_)
    wanted_out, wanted_state = recurrence(*given_)
    assert torch.allclose(out, wanted_out, rtol=1e-9, atol=1e-9)
    assert torch.allclose(state, wanted_state, rtol=1e-9, atol=1e-9)
    assert torch.equal(given_[-1], before)


@pytest.mark.parametrize(("strongest", "most"), [(0.01, 1e-4), (1.0, 1e-4), (200.0, 1e-3)])
def test_float32_stays_close(strongest: float, most: float) -> None:
    """float32 chunks stay near the float64 recurrence over 200 tokens, without overflow or NaN.  Decays a hundred times those
    of real models lose three digits in the sum over a chunk.
    """
    given_ = inputs(200, 16, 0, strongest)
    out, state = delta_rule(*(tensor.float() for tensor in given_))
    wanted_out, wanted_state = recurrence(*given_)
    assert (out - wanted_out).abs().max() < most
    assert (state - wanted_state).abs().max() < most


def test_pieces_of_a_sequence_are_the_sequence() -> None:
    """The state carries all that there is to carry, wherever a sequence is cut."""
    *tensors, state = inputs(70, 8, 3, 1.0)
    whole, last = delta_rule(*tensors, state)
    outs = []
    for part in zip(*(tensor.split([41, 1, 28], dim=2) for tensor in tensors), strict=True):
        out, state = delta_rule(*part, state)
        outs.append(out)
    assert torch.allclose(torch.cat(outs, dim=2), whole, rtol=1e-9, atol=1e-9)
    assert torch.allclose(state, last, rtol=1e-9, atol=1e-9)


def test_a_convolution_sees_the_past_alone() -> None:
    """Each channel by itself, the token and the taps before it; what is kept are the last inputs."""
    conv = ShortConvolution("c", 5, 3, (0, 5), dtype=torch.float64)
    weight = torch.randn(15, 1, 3, dtype=torch.float64)
    conv.weight = torch.nn.Parameter(weight, requires_grad=False)
    before, x = torch.randn(2, 15, 2, dtype=torch.float64), torch.randn(2, 15, 4, dtype=torch.float64)
    out, kept = conv(x, before)
    reached = torch.cat((before, x), dim=-1)
    for t in range(4):
        assert torch.allclose(out[..., t], (reached[..., t : t + 3] * weight[:, 0]).sum(-1))
    assert torch.equal(kept, x[..., -2:])


def test_decays_never_grow() -> None:
    """Whatever comes in, a factor is at most 1, and computed in float32 from a model of another dtype."""
    gate = ForgetGate("g", KDAShape(8, 2, 4, 4, 1e-5), (0, 2))
    gate.a_log = torch.nn.Parameter(torch.tensor([-3.0, 3.0]).view(1, 1, 2, 1), requires_grad=False)
    gate.dt_bias = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
    decay = gate(torch.tensor([-1e4, -1.0, 0.0, 1.0, 1e4, 60.0, 20.0, 3.0], dtype=torch.bfloat16).view(1, 1, 8))
    assert decay.shape == (1, 1, 2, 4) and decay.dtype == torch.float32
    assert decay.isfinite().all() and (decay <= 0).all()
