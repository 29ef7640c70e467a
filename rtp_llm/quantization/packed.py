"""Integers of four or eight bits packed into int32 along the input, as compressed-tensors' ``pack-quantized`` has them.

``W[n, k] = (u[n, k] - z[n, G]) * scale[n, G]`` with unsigned codes ``u``; ``G`` is ``k // group``, or what ``weight_g_idx`` says.
Without zero points ``z`` is ``2 ** (bits - 1)``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rtp_llm.quantization.faults import QuantFault
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm
from rtp_llm.quantization.limits import ExactValues, ValueChecks, ValueRange, scale_limit
from rtp_llm.quantization.scheme import Finding, Scheme, Stored, Tensors, bad_scales, broadcast_scales, of_dtype, required, unpack

_SCALES = ("float16", "bfloat16", "float32")
_INT32 = ("int32",)


def bad_index(tensors: Tensors, name: str, groups: int, first: int = 0) -> Iterator[Finding]:
    """A finding if a group index is outside of the ``groups`` that begin at ``first``."""
    low, high = map(int, torch.aminmax(tensors[name]))
    if low < first or high >= first + groups:
        expected = f"{first} to {first + groups - 1}"
        yield Finding(QuantFault.BAD_INDEX, name, "points to groups that are not there", expected, f"{low} to {high}")


@dataclass(frozen=True, slots=True)
class Packed:
    """``zero`` and ``index`` are None if the format has none.  ``rows``: those of ``weight_shape``, if it counts several matrices
    stored as one; None if it is the matrix's own."""

    label: str
    bits: int
    scale: TensorForm
    shape: TensorForm | None
    zero: TensorForm | None
    index: TensorForm | None
    rows: int | None = None

    def _stated(self, matrix: Matrix) -> tuple[int, int]:
        """What ``weight_shape`` has to say."""
        return self.rows or matrix.shape[ROWS], matrix.shape[COLUMNS]

    @property
    def _codes(self) -> TensorForm:
        return TensorForm("weight_packed", "int32", (Along(ROWS), Along(COLUMNS, 32 // self.bits)))

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        return (self._codes, *(form for form in (self.scale, self.shape, self.zero, self.index) if form is not None))

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        codes = unpack(tensors["weight_packed"], self.bits).float()
        scale = self._grouped(tensors, tensors[self.scale.name].float(), matrix)
        if self.zero is None:
            return (codes - float(2 ** (self.bits - 1))) * scale
        zero = unpack(tensors[self.zero.name].t(), self.bits).t().float()
        return (codes - self._grouped(tensors, zero, matrix)) * scale

    def _grouped(self, tensors: Tensors, values: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """``values [rows, groups]`` for each column."""
        if self.index is not None:
            return values[:, tensors[self.index.name].long()]
        return broadcast_scales(values, self.scale, matrix)

    def limits(self, matrix: Matrix) -> ValueChecks:
        found: dict[str, ValueRange | ExactValues] = {self.scale.name: scale_limit(self.scale.dtype)}
        if self.index is not None:
            groups = self.scale.dims[1]
            found[self.index.name] = ValueRange(0, groups.span(matrix)[1] - groups.span(matrix)[0] - 1)
        if self.shape is not None:
            found[self.shape.name] = ExactValues(self._stated(matrix))
        return found

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        yield from bad_scales(tensors, self.scale.name)
        if self.index is not None:
            yield from bad_index(tensors, self.index.name, tensors[self.scale.name].shape[1])
        if self.shape is not None and tuple(tensors[self.shape.name].tolist()) != self._stated(matrix):
            what, found = "states another shape than the model's", str(tensors[self.shape.name].tolist())
            yield Finding(QuantFault.CONTRADICTION, self.shape.name, what, str(list(self._stated(matrix))), found)


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """``group``: input elements to a scale; None for a scale a row.  ``ordered``: groups are not runs (``actorder: group``)."""

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool = False

    @property
    def label(self) -> str:
        each = "row" if self.group is None else f"{self.group} columns"
        kind = "" if self.symmetric else ", zero points"
        return f"INT{self.bits} packed, a scale for each {each}{kind}"

    @property
    def names(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        required(stored, ("weight_packed",), "the packed weight is not there")
        of_dtype(stored, "weight_packed", _INT32, "is declared to be packed into int32")
        required(stored, ("weight_scale",), "the quantised weight has no scale")
        dtype = of_dtype(stored, "weight_scale", _SCALES, "is a scale of an unknown type")
        indexed = self.group is not None and "weight_g_idx" in stored
        groups = Fixed(1) if self.group is None else Along(COLUMNS, self.group, whole=indexed)
        zero = index = shape = rows = None
        if not self.symmetric:
            required(stored, ("weight_zero_point",), "is declared asymmetric, and has no zero points")
            of_dtype(stored, "weight_zero_point", _INT32, "is declared to be packed into int32")
            zero = TensorForm("weight_zero_point", "int32", (Along(ROWS, 32 // self.bits), groups))
        if indexed:
            kind = of_dtype(stored, "weight_g_idx", ("int32", "int64"), "is an index of another type")
            index = TensorForm("weight_g_idx", kind, (Along(COLUMNS),))
        elif self.ordered and self.group is not None:
            required(stored, ("weight_g_idx",), "groups are declared to be in another order than columns, and have no index")
        if "weight_shape" in stored:
            kind = of_dtype(stored, "weight_shape", ("int64", "int32"), "is a shape of another type")
            shape = TensorForm("weight_shape", kind, (Fixed(2),))
            whole = stored["weight_packed"].whole
            rows = None if whole is None else whole[ROWS]
        return Packed(self.label, self.bits, TensorForm("weight_scale", dtype, (Along(ROWS), groups)), shape, zero, index, rows)
