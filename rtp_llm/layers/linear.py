"""Linear layers over tensor-parallel ranks (Megatron-LM: Shoeybi et al., 2019, arXiv:1909.08053).

All of them are one class: a stack of *parts*, each with rows of one logical matrix, over one span of input columns.  The
subclasses choose rows and columns.  Weights are ``[out, in]`` as in ``torch.nn.Linear``; the slots ``s.weight`` and
``s.bias`` fill the part ``s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.quantised import WEIGHT, Quantisable
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.parallel.shard import Span, even, kv_heads
from rtp_llm.plan.derived import DerivedTile
from rtp_llm.plan.pieces import Fill, Piece
from rtp_llm.quantization.forms import Matrix


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Rows ``span`` of the logical matrix ``slot``, which has ``size`` rows in all."""

    slot: str
    size: int
    span: Span

    @property
    def rows(self) -> int:
        """Rows that this rank holds."""
        return self.span[1] - self.span[0]


class Linear(Quantisable):
    """``x[..., columns] -> x W^T + b [..., rows of all parts]``, on one rank, without any collective.

    Parameters: ``weight [rows, columns]`` and, where ``bias``, ``bias [rows]``, both of ``dtype``; with a quantisation scheme its
    tensors replace ``weight``.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, parts: Sequence[LinearPart], in_size: int, in_span: Span, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.in_size = in_size
        self.in_span = in_span
        rows = sum(part.rows for part in self.parts)
        self.declare("weight", (rows, in_span[1] - in_span[0]), dtype)
        if bias:
            self.declare("bias", (rows,), dtype)
        else:
            self.bias = None

    def weights(self) -> dict[str, tuple[Matrix, ...]]:
        return {WEIGHT: tuple(Matrix(part.slot, (part.size, self.in_size), part.span, self.in_span) for part in self.parts)}

    def tiles(self) -> dict[str, tuple[Piece | Fill | DerivedTile, ...]]:
        weight: list[Piece | Fill | DerivedTile] = []
        bias: list[Piece | Fill | DerivedTile] = []
        columns = (0, self.in_span[1] - self.in_span[0])
        at = 0
        for part in self.parts:
            local = (at, at + part.rows)
            weight.append(Piece(f"{part.slot}.weight", (part.size, self.in_size), (part.span, self.in_span), (local, columns)))
            bias.append(Piece(f"{part.slot}.bias", (part.size,), (part.span,), (local,)))
            at += part.rows
        return {"weight": tuple(weight), "bias": tuple(bias)} | self.held_tiles()

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x W^T + bias``, by the kernel chosen at start-up, else with dequantised weights.

        Kernels give bfloat16, so models of another dtype use dequantised weights.
        """
        if not self.held:
            return F.linear(x, self.weight, bias)
        kernel = self.products.get(WEIGHT)
        return F.linear(x, self.dense(WEIGHT).to(x.dtype), bias) if kernel is None or x.dtype != torch.bfloat16 else kernel(x, bias)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """``W [out, in]`` in ``dtype``; a temporary tensor if it is quantised."""
        return self.weight.to(dtype) if not self.held else self.dense(WEIGHT).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.bias)

    def extra_repr(self) -> str:
        return f"{', '.join(f'{p.slot}[{p.span[0]}:{p.span[1]}]' for p in self.parts)}, in={self.in_span}, bias={self.bias is not None}" + (
            f", {self.held[WEIGHT].scheme.label}" if self.held else ""
        )


class ReplicatedLinear(Linear):
    """The whole matrix on every rank."""

    def __init__(self, slot: str, in_size: int, out_size: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__([LinearPart(slot, out_size, (0, out_size))], in_size, (0, in_size), bias=bias, dtype=dtype)


class MergedColumnParallelLinear(Linear):
    """Several matrices over one input, each split by output rows: gate and up as one product.

    Returns this rank's share of each output, concatenated, ``[..., sum(out_sizes) / tp]``, in the order of ``slots``.
    """

    def __init__(
        self, slots: Sequence[str], in_size: int, out_sizes: Sequence[int], *, bias: bool, tp: TensorParallel, dtype: torch.dtype
    ) -> None:
        parts = [LinearPart(slot, size, even(size, tp.size, tp.rank)) for slot, size in zip(slots, out_sizes, strict=True)]
        super().__init__(parts, in_size, (0, in_size), bias=bias, dtype=dtype)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One matrix split by output rows; returns this rank's ``[..., out_size / tp]``."""

    def __init__(self, slot: str, in_size: int, out_size: int, *, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__([slot], in_size, [out_size], bias=bias, tp=tp, dtype=dtype)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The heads of one attention block, over all ranks, each of ``head_dim`` elements."""

    heads: int
    kv_heads: int
    head_dim: int


class QKVParallelLinear(Linear):
    """Query, key and value as one product, split by heads; with more ranks than KV heads, ranks share a KV head.

    Filled by ``{slot}.q``, ``{slot}.k`` and ``{slot}.v``.  Returns ``[..., (heads + 2 * kv_heads) * head_dim]``, counting
    local heads; ``sizes`` splits it into q, k and v.
    """

    def __init__(self, slot: str, in_size: int, shape: HeadShape, *, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        q, k = even(shape.heads, tp.size, tp.rank), kv_heads(shape.kv_heads, tp.size, tp.rank)
        spans = {"q": (shape.heads, q), "k": (shape.kv_heads, k), "v": (shape.kv_heads, k)}
        head_dim = shape.head_dim
        parts = [LinearPart(f"{slot}.{name}", n * head_dim, (a * head_dim, b * head_dim)) for name, (n, (a, b)) in spans.items()]
        super().__init__(parts, in_size, (0, in_size), bias=bias, dtype=dtype)
        self.heads = q[1] - q[0]
        self.kv_heads = k[1] - k[0]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Output columns of q, k and v."""
        q, k, v = self.parts
        return q.rows, k.rows, v.rows


class RowParallelLinear(Linear):
    """One matrix split by input columns: takes this rank's ``[..., in_size / tp]``, returns the sum over ranks, ``[..., out_size]``.

    Every rank holds the whole bias and adds it once, to the sum.
    """

    def __init__(self, slot: str, in_size: int, out_size: int, *, bias: bool, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__([LinearPart(slot, out_size, (0, out_size))], in_size, even(in_size, tp.size, tp.rank), bias=bias, dtype=dtype)
        self.tp = tp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.product(x, self.bias)
        total = self.tp.all_reduce(self.product(x, None))
        return total if self.bias is None else total + self.bias
