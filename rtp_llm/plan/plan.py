"""The plan: what is read, and where it goes.  Frozen; every other view (JSON, text, budget) derives from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import prod

from rtp_llm.checkpoint.catalog import Catalog, TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.config.parallel import ParallelConfig
from rtp_llm.errors import PlanError, Problem
from rtp_llm.plan import rules
from rtp_llm.plan.boxes import Box, extent, volume
from rtp_llm.plan.derived import DerivedTensor
from rtp_llm.plan.experts import ExpertLayout, expert_layouts
from rtp_llm.plan.ops import Source
from rtp_llm.plan.pieces import ExpertSlots, Fill, ParamSpec
from rtp_llm.plan.ranges import parts

#: Lines hashed by one call: one call a line takes longer than the hash, and all lines are tens of megabytes.
_LINES_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """A place in a local parameter."""

    param: str
    box: Box


@dataclass(frozen=True, slots=True)
class Delivery:
    """``slot_box`` of ``slot``, which ``tensor`` provides through ``source``, and every local place that wants it.

    Each delivery's bytes are read once, however many targets it has.
    """

    slot: str
    tensor: TensorInfo
    source: Source
    slot_box: Box
    targets: tuple[Target, ...]

    @property
    def raw_box(self) -> Box:
        """The box of the raw tensor to read."""
        return self.source.pull(self.slot_box)

    @property
    def passes(self) -> bool:
        """Whether just the wanted bytes are read: no op needs more, and the tensor is row-major in its file."""
        return self.tensor.strides is None and self.source.passes(self.slot_box)

    @property
    def divisible(self) -> bool:
        """Whether it may be read in parts: no op, and no order of elements in the file, ties them together."""
        return self.tensor.strides is None and (not self.source.ops or all(op.local for op in self.source.ops))

    @property
    def verbatim(self) -> bool:
        """Whether the bytes of ``raw_box``, end to end, are those of ``slot_box``: no op moves elements."""
        return not self.source.ops or all(op.verbatim for op in self.source.ops)

    @property
    def stored_dtype(self) -> str | None:
        """torch's name of the dtype in the file."""
        return DTYPES[self.tensor.dtype].torch_name

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        if self.tensor.strides is not None:
            return self.tensor.nbytes
        return volume(self.raw_box) * self.tensor.nbytes // max(1, prod(self.tensor.shape))

    def parts(self, most_bytes: int) -> Iterator[Delivery]:
        """This delivery cut into parts of at most ``most_bytes`` read, along the raw tensor's leading dimensions; one
        that is not divisible stays whole."""
        if not self.divisible or self.nbytes <= most_bytes:
            yield self
            return
        elements = max(1, most_bytes * prod(self.tensor.shape) // self.tensor.nbytes)
        for raw_box in parts(self.raw_box, elements):
            yield self.part(raw_box)

    def part(self, raw_box: Box) -> Delivery:
        """The part of this delivery that reads ``raw_box``, a box inside :attr:`raw_box`."""
        slot_box = self.source.push(raw_box)
        moved = tuple(replace(t, box=_within(t.box, self.slot_box, slot_box)) for t in self.targets)
        return replace(self, slot_box=slot_box, targets=moved)


def _within(local: Box, outer: Box, inner: Box) -> Box:
    """The part of ``local`` that belongs to ``inner``, where ``local`` as a whole belongs to ``outer``.

    ``local`` may have leading dimensions of extent 1 before the slot's own.
    """
    lead = len(local) - len(outer)
    tail = ((a + i - o, a + j - o) for (a, _), (o, _), (i, j) in zip(local[lead:], outer, inner, strict=True))
    return (*local[:lead], *tail)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A checkpoint tensor that a named rule leaves out."""

    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An entry of a list that says which modules are quantised, and how many it matched."""

    entry: str
    matched: int


@dataclass(frozen=True, slots=True)
class Quantization:
    """What is quantised, by ``method``: each scheme with the number of modules that have it; the entries of lists; and plain
    modules that the declaration does not name.  Counts of weights quantised while loading are this rank's."""

    method: str
    schemes: tuple[tuple[str, int], ...]
    listed: tuple[Listed, ...] = ()
    undeclared: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSide:
    """What one rank's model asks of a checkpoint.

    ``dtype`` is torch's name; ``params`` are this rank's; ``experts`` those of every layer on all ranks, empty for a model without.
    """

    architecture: str
    family: str
    parallel: ParallelConfig
    dtype: str
    params: tuple[ParamSpec, ...]
    experts: tuple[ExpertSlots, ...] = field(default=(), repr=False)
    quantization: Quantization | None = None

    @property
    def parameters(self) -> int:
        """Elements of this rank's parameters, padding included."""
        return sum(prod(p.shape) for p in self.params)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank loads: final as :func:`rtp_llm.plan.join.join` makes it.  What it costs is a :class:`Budget`.

    ``digest`` hashes what all ranks must agree on (files, tensors, mapping, sizes, dtype; no path, no rank).  ``bytes_read``: read from
    storage by the deliveries.  ``bytes_resident``: this rank's parameters.  ``missing``, ``unexpected`` and
    ``problems`` are empty in a plan that may be carried out.
    """

    model: ModelSide
    catalog: Catalog = field(repr=False)
    mapping: rules.Mapping = field(repr=False)
    slots: Mapping[str, Source] = field(repr=False)
    deliveries: tuple[Delivery, ...]
    fills: tuple[tuple[str, Fill], ...]
    derived: Mapping[str, DerivedTensor]
    skipped: tuple[Skipped, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[Problem, ...]
    bytes_read: int
    bytes_resident: int
    model_digest: str
    digest: str

    def agreement_lines(self) -> Iterator[str]:
        """The lines that :attr:`digest` hashes; see the function of this name."""
        return agreement_lines(self.model, self.catalog.tensors, self.slots, self.model_digest)

    def expert_layouts(self) -> dict[tuple[int, str], ExpertLayout]:
        """How the checkpoint has the experts, by layer and weight (``gate_up``, ``down``); see the function of this name."""
        return expert_layouts(self.mapping, (t.name for t in self.catalog.tensors)) if self.model.experts else {}

    def raise_for_problems(self) -> None:
        """Raises ``PlanError`` with everything that forbids this load."""
        if self.problems:
            raise PlanError(self.problems)


def agreement_lines(model: ModelSide, tensors: tuple[TensorInfo, ...], slots: Mapping[str, Source], model_digest: str) -> Iterator[str]:
    """What all ranks must have in common, a line each, in a fixed order; the digest is their hash.

    Lines are compared when digests differ, so that the first difference can be named.
    """
    yield f"architecture {model.architecture} dtype {model.dtype} tp_size {model.parallel.tp_size} ep_size {model.parallel.ep_size}"
    yield f"logical tensors {model_digest}"
    if model.quantization is not None:
        # Without the counts: ranks with fewer experts quantise fewer weights.
        yield f"quantisation {model.quantization.method} {sorted(name for name, _ in model.quantization.schemes)}"
    for layer in model.experts:
        yield f"experts of layer {layer.layer} on expert-parallel ranks {layer.held}"
    for t in tensors:
        yield f"tensor {t.name} {t.dtype} {list(t.shape)} in {t.file} at {t.start}"
    for slot in sorted(slots):
        source = slots[slot]
        yield f"slot {slot} from {source.raw} {source.ops!r}"


def digest(lines: Iterator[str]) -> str:
    """SHA-256 over lines, in hexadecimal."""
    sha = hashlib.sha256()
    while some := list(islice(lines, _LINES_AT_ONCE)):
        sha.update("".join([f"{line}\n" for line in some]).encode())
    return sha.hexdigest()


def compatible(slot_box: Box, local_box: Box) -> bool:
    """Whether a slot's box may fill a parameter's: same extents, but for leading dimensions of extent 1."""
    lead = len(local_box) - len(slot_box)
    return lead >= 0 and extent(local_box) == (1,) * lead + extent(slot_box)
