"""FP4 (E2M1) pairs in bytes, the lower nibble first, with block scales: NVFP4 and MXFP4 (OCP Microscaling Formats 1.0).

MXFP4: ``W = e2m1 * 2 ** (scale - 127)``, a scale for 32 columns.  NVFP4: ``W = e2m1 * scale * second``, an E4M3 scale for 16
columns and a float32 one for the tensor; compressed-tensors stores the reciprocal of the second, and divides.
gpt-oss's MXFP4 has a further dimension for the bytes of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm
from rtp_llm.quantization.limits import ValueChecks, scale_limit
from rtp_llm.quantization.scaled import scalar
from rtp_llm.quantization.scheme import (
    SCALE_DTYPES,
    Finding,
    Scheme,
    Stored,
    Tensors,
    bad_scales,
    broadcast_scales,
    of_dtype,
    required,
    values_of,
)


def e2m1(pairs: torch.Tensor) -> torch.Tensor:
    """``uint8 [..., n] -> float32 [..., 2 n]``: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 by the lower three bits, bit 3 is the sign."""
    code = torch.arange(16, device=pairs.device)
    exponent, mantissa = code >> 1 & 3, code & 1
    # Computed on the device: a copy from the host cannot be recorded in a CUDA graph.  In quarters, as whole
    # numbers: no device rounds those.
    magnitude = torch.where(exponent > 0, (2 + mantissa) << exponent, 2 * mantissa).float() / 4
    table = torch.where(code < 8, magnitude, -magnitude)
    codes = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(-2)
    return table[codes.int()]


@dataclass(frozen=True, slots=True)
class Float4:
    """``second`` is None for MXFP4; ``reciprocal``: it divides.  ``static``: the scale of activations, kept beside the weight."""

    label: str
    codes: TensorForm
    scale: TensorForm
    second: TensorForm | None = None
    reciprocal: bool = False
    static: TensorForm | None = None

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        return (self.codes, self.scale, *(form for form in (self.second, self.static) if form is not None))

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        # The product of code and block scale is exact in float32, so the result is rounded once.
        weight = e2m1(tensors[self.codes.name]).flatten(1) * broadcast_scales(values_of(tensors[self.scale.name]), self.scale, matrix)
        if self.second is None:
            return weight
        second = tensors[self.second.name].float()
        return weight / second if self.reciprocal else weight * second

    def limits(self, matrix: Matrix) -> ValueChecks:
        return {form.name: scale_limit(form.dtype) for form in self.forms[1:]}

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        yield from bad_scales(tensors, self.scale.name, *(form.name for form in (self.second, self.static) if form is not None))


@dataclass(frozen=True, slots=True)
class Float4Spec:
    """``codes``, ``scale``, ``second``, ``static``: the names of tensors; ``second`` is "" for MXFP4.

    ``apart``: codes are ``[rows, blocks, bytes of a block]``, not ``[rows, bytes]``.
    """

    block: int
    codes: str
    second: str = ""
    reciprocal: bool = False
    static: str = ""
    scale: str = "weight_scale"
    apart: bool = False

    @property
    def label(self) -> str:
        return f"{'NVFP4' if self.second else 'MXFP4'}, a scale for each {self.block} columns"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.codes, self.scale, self.second, self.static) if name)

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        required(stored, (self.codes,), "the packed weight is not there")
        of_dtype(stored, self.codes, ("uint8",), "is declared to hold pairs of FP4 codes")
        required(stored, (self.scale,), "the quantised weight has no scale")
        kinds = ("float8_e4m3fn",) if self.second else ("uint8", "float8_e8m0fnu")
        dtype = of_dtype(stored, self.scale, kinds, "is a block scale of another type")
        scale = TensorForm(self.scale, dtype, (Along(ROWS), Along(COLUMNS, self.block)))
        columns = (Along(COLUMNS, self.block), Fixed(self.block // 2)) if self.apart else (Along(COLUMNS, 2),)
        codes = TensorForm(self.codes, "uint8", (Along(ROWS), *columns))
        second = None
        if self.second:
            required(stored, (self.second,), "the quantised weight has no scale for the tensor")
            second = self._number(stored, self.second)
        static = self._number(stored, self.static) if self.static in stored else None
        return Float4(self.label, codes, scale, second, self.reciprocal, static)

    @staticmethod
    def _number(stored: Mapping[str, Stored], name: str) -> TensorForm:
        return TensorForm(name, of_dtype(stored, name, SCALE_DTYPES, "is a scale of an unknown type"), scalar(name, stored[name]))
