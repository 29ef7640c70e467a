"""The interface of a quantisation scheme, and arithmetic that several schemes share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from rtp_llm.plan.boxes import Shape
from rtp_llm.quantization.faults import QuantFault
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Matrix, TensorForm
from rtp_llm.quantization.limits import ValueChecks

#: The tensors of one matrix's shard, by name.
Tensors = Mapping[str, torch.Tensor]

#: torch's names of the dtypes that scales are stored in.
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the catalogue: torch's name of its dtype, and its shape.

    ``whole``: the shape in the file, if the tensor is a part of one with several matrices.
    """

    dtype: str
    shape: Shape
    whole: Shape | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with one tensor of a matrix, by the tensor's name after the matrix's slot."""

    fault: QuantFault
    tensor: str
    what: str
    expected: str
    actual: str
    fix: str | None = None


class Misread(Exception):
    """The tensors are not what was declared; callers of this package catch it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.what)
        self.finding = finding


class Scheme(Protocol):
    """How one quantised matrix is stored.  Implementations are frozen dataclasses; equal ones may share a parameter."""

    @property
    def label(self) -> str:
        """A few words for reports: ``FP8, a scale for each block of 128 x 128``."""

    @property
    def forms(self) -> tuple[TensorForm, ...]:
        """Its tensors."""

    def dequantise(self, tensors: Tensors, matrix: Matrix) -> torch.Tensor:
        """The shard's weights, float32 ``[rows, columns]``: the format's formula, rounded once."""

    def limits(self, matrix: Matrix) -> ValueChecks:
        """The allowed values of the tensors that are checked: scales, indices, codes of few bits."""

    def check(self, tensors: Tensors, matrix: Matrix) -> Iterator[Finding]:
        """Findings for values outside their limits; waits for the device."""


class Spec(Protocol):
    """A declared quantisation, before the tensors are known: some formats leave dtypes and names open."""

    @property
    def label(self) -> str:
        """As in :class:`Scheme`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names, after the matrix's, of all tensors that it may have."""

    def build(self, stored: Mapping[str, Stored]) -> Scheme:
        """The scheme of a matrix with these tensors.

        Raises:
            Misread: they are not what this declares.
        """


def required(stored: Mapping[str, Stored], names: tuple[str, ...], what: str) -> str:
    """The first of ``names`` that exists.

    Raises:
        Misread: ``MISSING_PART``.
    """
    for name in names:
        if name in stored:
            return name
    raise Misread(Finding(QuantFault.MISSING_PART, names[0], what, " or ".join(names), f"only {', '.join(sorted(stored)) or 'nothing'}"))


def of_dtype(stored: Mapping[str, Stored], name: str, dtypes: tuple[str, ...], what: str) -> str:
    """The dtype of a tensor that must have one of ``dtypes``.

    Raises:
        Misread: ``CONTRADICTION``.
    """
    found = stored[name].dtype
    if found not in dtypes:
        raise Misread(Finding(QuantFault.CONTRADICTION, name, what, " or ".join(dtypes), found))
    return found


def broadcast_scales(tensor: torch.Tensor, form: TensorForm, matrix: Matrix) -> torch.Tensor:
    """Scales or zero points of a shard, repeated for its rows and columns: broadcastable to ``[rows, columns]``."""
    for i, dim in enumerate(form.dims):
        if isinstance(dim, Along) and dim.per > 1:
            # Indexed, not repeated: a declared block may be far larger than the matrix.
            start, stop = matrix.spans[dim.axis]
            elements = torch.arange(start, stop, device=tensor.device) // dim.per - dim.span(matrix)[0]
            tensor = tensor.index_select(i, elements)
    order = [dim.axis for dim in form.dims if isinstance(dim, Along)]
    if order == [ROWS, COLUMNS]:
        return tensor
    if order == [COLUMNS, ROWS]:
        return tensor.t()
    return tensor.reshape(-1, 1) if order == [ROWS] else tensor.reshape(1, -1)


def values_of(scale: torch.Tensor) -> torch.Tensor:
    """A scale as float32; ``uint8`` holds exponents (E8M0: ``2 ** (byte - 127)``, 255 is NaN)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def bad_scales(tensors: Tensors, *names: str) -> Iterator[Finding]:
    """Findings for scales that are not finite, or negative."""
    for name in names:
        values = values_of(tensors[name])
        bad = ~torch.isfinite(values) | (values < 0)
        if bad.any():
            actual = f"{int(bad.sum())} of {bad.numel()} are not, the first is {values[bad][0].item()}"
            yield Finding(QuantFault.BAD_SCALE, name, "holds scales that scale nothing", "finite numbers, not negative", actual)


def unpack(words: torch.Tensor, bits: int, shifts: torch.Tensor | None = None) -> torch.Tensor:
    """``int32 [..., n] -> int32 [..., n * 32 / bits]``: unsigned codes, the lowest bits first unless ``shifts`` says otherwise."""
    if shifts is None:
        shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes: torch.Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)
