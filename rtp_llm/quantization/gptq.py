"""``quant_method: gptq`` (Frantar et al., 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write it.

``W[n, k] = (q[k, n] - z[G, n]) * scales[G, n]`` with ``G = g_idx[k]``, or ``k // group`` without an index.  Files of the first
version store ``z - 1``, those of the second ``z``.  Symmetric ones have ``z = 2 ** (bits - 1)``, whatever they store, since
published files contradict their version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm
from rtp_llm.quantization.limits import ExactValues, ValueChecks, ValueRange, scale_limit
from rtp_llm.quantization.names import Names
from rtp_llm.quantization.packed import bad_index
from rtp_llm.quantization.scheme import Finding, Scheme, Spec, Stored, Tensors, bad_scales, broadcast_scales, of_dtype, required, unpack

METHOD = "gptq"
#: One in every code of a word: turns the first version's zero points into the second's.  Added to the whole word with carries,
#: as the writers subtract it from the whole word.
_ONES = {4: 0x11111111, 8: 0x01010101}


@dataclass(frozen=True, slots=True)
class Gptq:
    """``scales``, ``zeros``, ``index``: their tensors; ``zeros`` and ``index`` are None where there is none."""

    label: str
    bits: int
    symmetric: bool
    stored_minus_one: bool
    scales: TensorForm
    zeros: TensorForm | None
    index: TensorForm | None

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        codes = TensorForm("qweight", "int32", (Along(COLUMNS, 32 // self.bits), Along(ROWS)))
        return (codes, self.scales, *(form for form in (self.zeros, self.index) if form is not None))

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        codes = unpack(tensors["qweight"].t(), self.bits).float()
        scale = self._grouped(tensors, tensors["scales"].float(), matrix)
        if self.symmetric or self.zeros is None:
            return (codes - float(2 ** (self.bits - 1))) * scale
        words = tensors["qzeros"]
        zeros = unpack(words + _ONES[self.bits] if self.stored_minus_one else words, self.bits).float()
        return (codes - self._grouped(tensors, zeros, matrix)) * scale

    def _grouped(self, tensors: Tensors, values: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """``values [groups, rows]`` for each column: ``[rows, columns]`` or broadcastable to it."""
        groups = self.scales.dims[0]
        if self.index is None or isinstance(groups, Fixed):
            return broadcast_scales(values, self.scales, matrix)
        return values[tensors["g_idx"].long() - groups.span(matrix)[0]].t()

    def limits(self, matrix: Matrix) -> ValueChecks:
        found: dict[str, ValueRange | ExactValues] = {"scales": scale_limit(self.scales.dtype)}
        if self.index is not None:
            first, last = self.scales.dims[0].span(matrix)
            found["g_idx"] = ValueRange(first, last - 1)
        return found

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        yield from bad_scales(tensors, "scales")
        if self.index is not None:
            groups = self.scales.dims[0]
            first, last = groups.span(matrix)
            yield from bad_index(tensors, "g_idx", last - first, first)


@dataclass(frozen=True, slots=True)
class GptqSpec:
    """``group``: input elements to a scale, None for all.  ``ordered``: groups are not runs (``desc_act``)."""

    bits: int
    group: int | None
    symmetric: bool
    stored_minus_one: bool
    ordered: bool

    @property
    def label(self) -> str:
        each = "row" if self.group is None else f"{self.group} columns"
        return f"GPTQ INT{self.bits}, a scale for each {each}{', by activation order' if self.ordered else ''}"

    @property
    def names(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx"

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        required(stored, ("qweight",), "the quantised weight is not there")
        of_dtype(stored, "qweight", ("int32",), "is declared to be packed into int32")
        required(stored, ("scales",), "the quantised weight has no scales")
        dtype = of_dtype(stored, "scales", ("float16", "bfloat16", "float32"), "is a scale of an unknown type")
        if not self.symmetric:
            required(stored, ("qzeros",), "is declared asymmetric, and has no zero points")
        if self.ordered and self.group is not None:
            required(stored, ("g_idx",), "is declared to be in activation order, and has no index")
        groups = Fixed(1) if self.group is None else Along(COLUMNS, self.group, whole=self.ordered)
        zeros = index = None
        if "qzeros" in stored:
            of_dtype(stored, "qzeros", ("int32",), "is declared to be packed into int32")
            zeros = TensorForm("qzeros", "int32", (groups, Along(ROWS, 32 // self.bits)))
        if "g_idx" in stored:
            kind = of_dtype(stored, "g_idx", ("int32", "int64"), "is an index of another type")
            index = TensorForm("g_idx", kind, (Along(COLUMNS),))
        scales = TensorForm("scales", dtype, (groups, Along(ROWS)))
        return Gptq(self.label, self.bits, self.symmetric, self.stored_minus_one, scales, zeros, index)


def parse(fields: FieldReader) -> Declared:
    """``dynamic`` maps regular expressions to overrides, in order: ``-:`` excludes modules, others change bits or groups."""
    stored = fields.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    base = _spec(fields, stored == "gptq")
    groups: list[Group] = []
    left_out: list[str] = []
    dynamic = fields.nested("dynamic")
    for pattern in dynamic.raw if dynamic is not None else ():
        if pattern.startswith("-:"):
            left_out.append(f"re:{pattern[2:]}")
            continue
        assert dynamic is not None
        own = dynamic.nested(pattern)
        overrides = own.raw if own is not None else {}
        changed = fields.beside({**fields.raw, **overrides}, f"{fields.path}dynamic.{pattern}.")
        groups.append(Group(_spec(changed, stored == "gptq"), Names((f"re:{pattern.removeprefix('+:')}",), "anchored")))
    excluded = Names((*left_out, *read_names(fields, "segments", "modules_to_not_convert").entries), "segments")
    fields.finish()
    options = (("checkpoint_format", stored), ("sym", str(fields.raw.get("sym", True)).lower()))
    return Declared(METHOD, (*groups, Group(base)), excluded, complete=bool(excluded), options=options)


def _spec(fields: FieldReader, minus_one: bool) -> Spec:
    bits = fields.integer_among("bits", 4, (4, 8))
    group = fields.raw.get("group_size", 128)
    size = None if group in (-1, None) else fields.integer("group_size", 128)
    return GptqSpec(bits, size, fields.boolean("sym", True), minus_one, fields.boolean("desc_act", False))
