"""Kimi Delta Attention (Kimi Linear, 2025, arXiv:2510.26692): linear attention with a state instead of a KV cache.

Each head keeps a matrix ``S [key, value]``.  Each token first decays it, by a factor for each key element.  It then corrects
the value for the token's key (the delta rule), and reads the value for its query.  :func:`delta_rule` does this a chunk
of tokens at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.attention import Step
from rtp_llm.layers.base import Planned
from rtp_llm.layers.cache import CacheShape
from rtp_llm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from rtp_llm.parallel.shard import Span, even
from rtp_llm.plan.pieces import Fill, Piece

if TYPE_CHECKING:
    from rtp_llm.parallel.groups import TensorParallel

#: Tokens of a chunk.  Work and memory inside a chunk grow with its square (32 heads of 128 take 16 MiB for 32 tokens),
#: the number of steps falls with it.
CHUNK = 32

#: What is added to the squared length of queries and keys before its root, as in the published kernels.
LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class KDAShape:
    """Sizes of one block, over all ranks; keys and values have ``head_dim`` elements each, gates have ``head_dim`` hidden ones."""

    hidden_size: int
    heads: int
    head_dim: int
    kernel: int
    norm_eps: float

    @property
    def width(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim


def delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule over a sequence: for each token, with ``a = exp(decay)``,

        S <- diag(a) S;  S <- S + beta k (v - k^T S);  out = q^T S

    Args:
        q, k, v: ``[batch, heads, seq, dim]``, q scaled already.
        decay: logarithms of the factors, at most 0, ``[batch, heads, seq, dim]``.
        beta: ``[batch, heads, seq]``.
        state: ``[batch, heads, dim (key), dim (value)]``, left as it is.

    All of one floating dtype, float32 or wider: rounding adds up over the sequence.

    Returns:
        ``out [batch, heads, seq, dim]`` and the state after the last token.
    """
    outs = []
    for start in range(0, q.shape[2], CHUNK):
        at = slice(start, start + CHUNK)
        out, state = _chunk(q[:, :, at], k[:, :, at], v[:, :, at], decay[:, :, at], beta[:, :, at], state)
        outs.append(out)
    return torch.cat(outs, dim=2), state


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One chunk, all tokens at once.

    With ``G`` the sum of decays up to a token, the state before correction ``u_i`` is a sum over earlier tokens:
    ``u_i = beta_i (v_i - (k_i e^G_i)^T S - sum_{j<i} (sum_c k_ic k_jc e^(G_ic - G_jc)) u_j)``: a unit triangular system.
    Differences of ``G`` are taken before the exponential, since ``e^-G`` alone overflows.
    """
    total = decay.cumsum(dim=2)
    size = q.shape[2]
    ahead = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(ahead[..., None], float("-inf")).exp()
    faded = total.exp()
    wanted = beta[..., None] * (v - (k * faded) @ state)
    overlap = torch.einsum("bhic,bhjc,bhijc->bhij", k, k, between) * beta[..., None]
    # A single token, as in decode, has no other corrections to solve for.
    corrections = wanted if size == 1 else torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    read = torch.einsum("bhic,bhjc,bhijc->bhij", q, k, between)
    out = (q * faded) @ state + read @ corrections
    last = total[:, :, -1:]
    return out, state * last.exp().transpose(-1, -2) + (k * (last - total).exp()).transpose(-1, -2) @ corrections


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension at length one."""
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + LENGTH_EPS)


class ShortConvolution(Planned):
    """A depthwise causal convolution of queries, keys and values.

    Parameter: ``weight [3 * width / tp, 1, kernel]``, filled by ``{slot}.q_conv.weight``, ``.k_conv.weight`` and
    ``.v_conv.weight``, each ``[width, 1, kernel]`` split by rows.
    """

    weight: nn.Parameter

    def __init__(self, slot: str, width: int, kernel: int, span: Span, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot, self.width, self.kernel, self.span = slot, width, kernel, span
        self.declare("weight", (3 * (span[1] - span[0]), 1, kernel), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        rows, rest = self.span[1] - self.span[0], ((0, 1), (0, self.kernel))
        shape = (self.width, 1, self.kernel)
        return {
            "weight": tuple(
                Piece(f"{self.slot}.{one}_conv.weight", shape, (self.span, *rest), ((i * rows, (i + 1) * rows), *rest))
                for i, one in enumerate("qkv")
            )
        }

    def forward(self, x: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolves ``x [batch, channels, seq]`` after the inputs ``before [batch, channels, kernel - 1]``.

        Returns the result, of ``x``'s shape, and the inputs before the next token."""
        reached = torch.cat((before, x), dim=-1)
        out = F.conv1d(reached, self.weight, groups=x.shape[1])
        return out, reached[..., reached.shape[-1] - (self.kernel - 1) :]


class ForgetGate(Planned):
    """``-exp(a) * softplus(x + bias)``: the decay of each key element, in float32.

    Parameters, float32 as published: ``a_log [1, 1, heads / tp, 1]`` and ``dt_bias [width / tp]``, from ``{slot}.a_log`` and
    ``{slot}.dt_bias``.
    """

    a_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, slot: str, shape: KDAShape, heads: Span) -> None:
        super().__init__()
        self.slot, self.shape, self.heads = slot, shape, heads
        count = heads[1] - heads[0]
        self.declare("a_log", (1, 1, count, 1), torch.float32)
        self.declare("dt_bias", (count * shape.head_dim,), torch.float32)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        (start, stop), dim, one = self.heads, self.shape.head_dim, (0, 1)
        count = stop - start
        a_log = Piece(f"{self.slot}.a_log", (1, 1, self.shape.heads, 1), (one, one, self.heads, one), (one, one, (0, count), one))
        dt_bias = Piece(f"{self.slot}.dt_bias", (self.shape.width,), ((start * dim, stop * dim),), ((0, count * dim),))
        return {"a_log": (a_log,), "dt_bias": (dt_bias,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [batch, seq, width / tp] -> [batch, seq, heads / tp, head_dim]``."""
        rates = F.softplus(x.float() + self.dt_bias)
        return -self.a_log.exp() * rates.view(*x.shape[:2], -1, self.shape.head_dim)


class GatedNorm(Planned):
    """``RMSNorm(x) * sigmoid(gate)`` over the last dimension, in float32 throughout.  Parameter: ``weight [size]``."""

    weight: nn.Parameter

    def __init__(self, slot: str, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot, self.eps = slot, eps
        self.declare("weight", (size,), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        return {"weight": (Piece.full(f"{self.slot}.weight", tuple(self.weight.shape)),)}

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """``x`` and ``gate [..., size]`` to float32 of the same shape."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide * self.weight.float() * torch.sigmoid(gate.float())


class KimiDeltaAttention(nn.Module):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``, split over heads.

    Slots under ``{slot}``: ``.q``, ``.k``, ``.v`` and their ``_conv``; ``.f_a``, ``.f_b``, ``.a_log``, ``.dt_bias`` (decay); ``.b`` (how
    much is corrected); ``.g_a``, ``.g_b``, ``.o_norm`` (output gate); ``.o``.  It uses no positions.

    The cache holds two states of a sequence: the inputs ``[channels, taps]`` of the next convolution, and the float32
    matrices ``[heads, head_dim, head_dim]``.
    """

    window: None = None
    call: None = None

    def __init__(self, slot: str, shape: KDAShape, *, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.layer = layer
        heads = even(shape.heads, tp.size, tp.rank)
        self.heads = heads[1] - heads[0]
        hidden, width, dim = shape.hidden_size, shape.width, shape.head_dim

        def column(name: str, in_size: int, out_size: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(f"{slot}.{name}", in_size, out_size, bias=False, tp=tp, dtype=dtype)

        slots = [f"{slot}.{one}" for one in "qkv"]
        self.qkv = MergedColumnParallelLinear(slots, hidden, (width,) * 3, bias=False, tp=tp, dtype=dtype)
        self.conv = ShortConvolution(slot, width, shape.kernel, (heads[0] * dim, heads[1] * dim), dtype=dtype)
        self.f_a = ReplicatedLinear(f"{slot}.f_a", hidden, dim, bias=False, dtype=dtype)
        self.f_b = column("f_b", dim, width)
        self.forget = ForgetGate(slot, shape, heads)
        self.b = column("b", hidden, shape.heads)
        self.g_a = ReplicatedLinear(f"{slot}.g_a", hidden, dim, bias=False, dtype=dtype)
        self.g_b = column("g_b", dim, width)
        self.o_norm = GatedNorm(f"{slot}.o_norm", dim, shape.norm_eps, dtype=dtype)
        self.o = RowParallelLinear(f"{slot}.o", width, hidden, bias=False, tp=tp, dtype=dtype)

    @property
    def cache_shape(self) -> CacheShape:
        """Nothing for each token."""
        inputs = (3 * self.heads * self.shape.head_dim, self.shape.kernel - 1)
        return CacheShape(states=((inputs, None), ((self.heads, self.shape.head_dim, self.shape.head_dim), torch.float32)))

    def forward(self, x: torch.Tensor, step: Step) -> torch.Tensor:
        before, state = self._zeros(x) if step.paged is None else step.paged.cache.kept(self.layer, step.paged.rows)
        mixed, inputs = self.conv(self.qkv(x).transpose(1, 2), before)
        q, k, v = (self._by_head(part.transpose(1, 2)) for part in F.silu(mixed).float().chunk(3, dim=1))
        decay = self.forget(self.f_b(self.f_a(x))).transpose(1, 2)
        beta = torch.sigmoid(self.b(x)).float().transpose(1, 2)
        recalled, state = delta_rule(_unit(q) * self.shape.head_dim**-0.5, _unit(k), v, decay, beta, state)
        if step.paged is not None:
            step.paged.cache.keep(self.layer, inputs, state)
        gate = self.g_b(self.g_a(x)).unflatten(-1, (-1, self.shape.head_dim))
        normed = self.o_norm(recalled.transpose(1, 2).to(x.dtype), gate)
        out: torch.Tensor = self.o(normed.to(x.dtype).flatten(2))
        return out

    def _zeros(self, x: torch.Tensor) -> list[torch.Tensor]:
        """The states of sequences that begin."""
        return [x.new_zeros(len(x), *shape, dtype=dtype) for shape, dtype in self.cache_shape.states]

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, seq, local width] -> [batch, local heads, seq, head_dim]``."""
        return x.reshape(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)
