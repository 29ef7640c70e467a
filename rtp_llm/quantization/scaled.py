"""Codes of eight bits times a scale: FP8 and INT8, with a scale for a tensor, a row, a group, or a block.

``W[n, k] = codes[n, k] * scale[n // bn, k // bk]``, also where the scale is called ``weight_scale_inv`` (DeepSeek-V3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from rtp_llm.quantization.faults import QuantFault
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm
from rtp_llm.quantization.limits import ExactValues, ValueChecks, ValueRange, scale_limit
from rtp_llm.quantization.scheme import (
    SCALE_DTYPES,
    Finding,
    Misread,
    Scheme,
    Stored,
    Tensors,
    bad_scales,
    broadcast_scales,
    of_dtype,
    required,
    values_of,
)

#: ``e4m3fnuz`` is the format of AMD's MI300; its codes are read as they are.
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")

#: A scale for the tensor, for each row, or for each block of rows and columns.
Grid = Literal["tensor", "channel"] | tuple[int, int]


def grid_label(grid: Grid) -> str:
    """A grid in words."""
    if isinstance(grid, str):
        return {"tensor": "a scale for each tensor", "channel": "a scale for each row"}[grid]
    rows, columns = grid
    return f"a scale for each {columns} columns" if rows == 1 else f"a scale for each block of {rows} x {columns}"


@dataclass(frozen=True, slots=True)
class Scaled:
    """Codes ``weight`` and their ``scale``; ``static``: the scale of static activations, or None.

    ``bits``: of the codes, if fewer than those of the dtype (INT4 in int8).
    """

    label: str
    grid: Grid
    weight: TensorForm
    scale: TensorForm
    static: TensorForm | None = None
    bits: int = 8

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        return (self.weight, self.scale) if self.static is None else (self.weight, self.scale, self.static)

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        return tensors[self.weight.name].float() * broadcast_scales(values_of(tensors[self.scale.name]), self.scale, matrix)

    def limits(self, matrix: Matrix) -> ValueChecks:
        found: dict[str, ValueRange | ExactValues] = {form.name: scale_limit(form.dtype) for form in self.forms[1:]}
        if self.bits < 8:
            found[self.weight.name] = ValueRange(-(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)
        return found

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        yield from bad_scales(tensors, self.scale.name)
        if self.static is not None:
            yield from bad_scales(tensors, self.static.name)
        if self.bits < 8:
            low, high = map(int, torch.aminmax(tensors[self.weight.name]))
            least = -(2 ** (self.bits - 1))
            if low < least or high >= -least:
                expected = f"{least} to {-least - 1}, as {self.bits} bits hold"
                yield Finding(QuantFault.BAD_CODE, self.weight.name, "holds codes out of range", expected, f"{low} to {high}")


@dataclass(frozen=True, slots=True)
class ScaledSpec:
    """``static``: whether ``input_scale`` must be there, may be, or may not."""

    grid: Grid
    dtypes: tuple[str, ...] = FP8_DTYPES
    scale_names: tuple[str, ...] = ("weight_scale",)
    scale_dtypes: tuple[str, ...] = SCALE_DTYPES
    static: Literal["needed", "allowed", "none"] = "none"
    bits: int = 8

    @property
    def label(self) -> str:
        kind = "FP8" if self.dtypes[0].startswith("float8") else f"INT{self.bits}"
        return f"{kind}, {grid_label(self.grid)}" + (", static activations" if self.static == "needed" else "")

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight", *self.scale_names, *(("input_scale",) if self.static != "none" else ()))

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        required(stored, ("weight",), "the quantised weight is not there")
        dtype = of_dtype(stored, "weight", self.dtypes, "is declared to be quantised, and is not of that type")
        name = required(stored, self.scale_names, "the quantised weight has no scale")
        scale_dtype = of_dtype(stored, name, self.scale_dtypes, "is a scale of an unknown type")
        weight = TensorForm("weight", dtype, (Along(ROWS), Along(COLUMNS)))
        scale = TensorForm(name, scale_dtype, self._dims(name, stored[name]))
        static = None
        if self.static == "needed":
            required(stored, ("input_scale",), "activations are declared static, and have no scale")
        if self.static != "none" and "input_scale" in stored:
            kind = of_dtype(stored, "input_scale", SCALE_DTYPES, "is a scale of an unknown type")
            static = TensorForm("input_scale", kind, scalar("input_scale", stored["input_scale"]))
        return Scaled(self.label, self.grid, weight, scale, static, self.bits)

    def _dims(self, name: str, found: Stored) -> tuple[Along | Fixed, ...]:
        if self.grid == "tensor":
            return scalar(name, found)
        if self.grid == "channel":
            return (Along(ROWS),) if len(found.shape) == 1 else (Along(ROWS), Fixed(1))
        rows, columns = self.grid
        # A group of INT4 belongs to one row and cannot be split; a block can, since each part keeps its scale.
        return Along(ROWS, rows, partial=rows > 1), Along(COLUMNS, columns, partial=rows > 1)


def scalar(name: str, found: Stored) -> tuple[Fixed, ...]:
    """The dimensions of one number, as formats write it: ``[]`` or ``[1]``.

    Raises:
        Misread: ``WRONG_GRID``, for anything else.
    """
    # A part of a fused tensor: the format has one number for all matrices stored as one.
    shape = found.shape if found.whole is None else found.whole
    if shape not in ((), (1,)):
        what = "is declared to be one scale for the whole tensor"
        raise Misread(Finding(QuantFault.WRONG_GRID, name, what, "[] or [1]", str(list(shape))))
    return tuple(Fixed(1) for _ in found.shape)
