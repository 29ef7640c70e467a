"""``quant_method: awq`` (Lin et al., 2023, arXiv:2306.00978), as AutoAWQ's GEMM version writes it.

``W[n, k] = (q[k, n] - z[G, n]) * scales[G, n]`` with ``G = k // group``; eight rows ``n`` share a word, in AWQ's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm
from rtp_llm.quantization.limits import ValueChecks, scale_limit
from rtp_llm.quantization.scheme import Finding, Scheme, Stored, Tensors, bad_scales, broadcast_scales, of_dtype, required, unpack

METHOD = "awq"
_PACK = 8


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Nibble ``i`` of a word holds row ``(0, 2, 4, 6, 1, 3, 5, 7)[i]``: odd rows stand in the upper half."""
    # Not from a list: a copy from the host cannot be recorded in a CUDA graph.
    row = torch.arange(_PACK, dtype=torch.int32, device=words.device)
    return unpack(words, 4, row % 2 * 16 + row // 2 * 4)


@dataclass(frozen=True, slots=True)
class Awq:
    """``zeros`` is None where zero points are all 8 and not stored."""

    label: str
    scales: TensorForm
    zeros: TensorForm | None

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        codes = TensorForm("qweight", "int32", (Along(COLUMNS), Along(ROWS, _PACK)))
        return (codes, self.scales) if self.zeros is None else (codes, self.scales, self.zeros)

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        codes = _unpacked(tensors["qweight"]).t().float()
        scale = broadcast_scales(tensors["scales"].float(), self.scales, matrix)
        zeros: torch.Tensor | float = 8.0
        if self.zeros is not None:
            # Unpacked, zero points are laid out as scales are.
            zeros = broadcast_scales(_unpacked(tensors["qzeros"]).float(), self.scales, matrix)
        return (codes - zeros) * scale

    def limits(self, matrix: Matrix) -> ValueChecks:
        return {"scales": scale_limit(self.scales.dtype)}

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        yield from bad_scales(tensors, "scales")


@dataclass(frozen=True, slots=True)
class AwqSpec:
    """``group``: input elements to a scale, None for all; ``zero_points``: they are stored."""

    group: int | None
    zero_points: bool

    @property
    def label(self) -> str:
        return f"AWQ INT4, a scale for each {'row' if self.group is None else f'{self.group} columns'}"

    @property
    def names(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales"

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        required(stored, ("qweight",), "the quantised weight is not there")
        of_dtype(stored, "qweight", ("int32",), "is declared to be packed into int32")
        required(stored, ("scales",), "the quantised weight has no scales")
        dtype = of_dtype(stored, "scales", ("float16", "bfloat16", "float32"), "is a scale of an unknown type")
        groups = Fixed(1) if self.group is None else Along(COLUMNS, self.group)
        zeros = None
        if self.zero_points:
            required(stored, ("qzeros",), "is declared asymmetric, and has no zero points")
        if "qzeros" in stored:
            of_dtype(stored, "qzeros", ("int32",), "is declared to be packed into int32")
            zeros = TensorForm("qzeros", "int32", (groups, Along(ROWS, _PACK)))
        return Awq(self.label, TensorForm("scales", dtype, (groups, Along(ROWS))), zeros)


def parse(fields: FieldReader) -> Declared:
    """Older files say ``w_bit`` and ``q_group_size``."""
    bits = fields.first("bits", "w_bit")
    fields.integer_among(bits, 4, (4,))
    fields.choice("version", "gemm", ("gemm",))
    size = fields.first("group_size", "q_group_size")
    group = None if fields.raw.get(size, 128) == -1 else fields.integer(size, 128)
    spec = AwqSpec(group, fields.boolean("zero_point", True))
    excluded = read_names(fields, "substring", "modules_to_not_convert")
    fields.finish()
    return Declared(METHOD, (Group(spec),), excluded, complete=bool(excluded))
