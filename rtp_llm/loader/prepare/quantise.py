"""Matches a checkpoint's quantisation with the model's layers, before any weight is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from rtp_llm.checkpoint import Catalog
from rtp_llm.checkpoint.config_json import read_json_file
from rtp_llm.errors import Problem
from rtp_llm.layers.quantised import Quantisable
from rtp_llm.parallel.shard import Divisibility, valid_sizes
from rtp_llm.plan import rules
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.expert_check import shape_problem
from rtp_llm.plan.plan import Listed, Quantization
from rtp_llm.plan.rules import template
from rtp_llm.quantization.companions import COMPANIONS
from rtp_llm.quantization.declared import Declared
from rtp_llm.quantization.faults import QuantFault, QuantizationError
from rtp_llm.quantization.forms import ROWS, Along, Matrix, TensorForm, split_units
from rtp_llm.quantization.inline import GRIDS, inline_scheme, stays_plain
from rtp_llm.quantization.recognise import Module, Recognised, modules_of, recognise, with_companions
from rtp_llm.quantization.registry import MODELOPT_FILE, read_declared
from rtp_llm.quantization.scheme import Scheme


def declared_in(raw: Mapping[str, Any], directory: str, requested: str | None) -> Declared | None:
    """What a checkpoint declares; see :func:`read_declared`."""
    return read_declared(raw, read_json_file(directory, MODELOPT_FILE), requested)


def quantised_mapping(mapping: rules.Mapping, declared: Declared | None) -> rules.Mapping:
    """The family's mapping, with the companions of quantised weights."""
    return mapping if declared is None else with_companions(mapping, COMPANIONS.values())


def quantise(
    model: nn.Module, catalog: Catalog, mapping: rules.Mapping, declared: Declared, conditions: Iterable[Divisibility]
) -> Quantization:
    """Lets every layer with quantised tensors hold them as stored; ``model`` is on the meta device.

    Args:
        model: one rank's, built plain.
        catalog: the checkpoint's.
        mapping: of :func:`quantised_mapping`.
        declared: what the tensors are checked against.
        conditions: the model's own on the number of ranks, to name the numbers that work.

    Raises:
        QuantizationError: everything that does not fit, at once.
    """
    layers = [module for module in model.modules() if isinstance(module, Quantisable)]
    linear = _LinearSlots(layers, declared.experts_only)
    modules = modules_of(mapping, catalog.tensors)
    found = recognise(declared, modules, linear)
    if found.problems or not found.schemes:
        shapes = _wrong_shapes(mapping, catalog)
        # A tensor that is there and cannot be divided is not missing.
        wrong = [shapes.get(p.tensor or "", p) if p.fault is QuantFault.MISSING_PART else p for p in found.problems]
        # The problem of a stacked tensor is found once for each expert, and reported once.
        raise QuantizationError(dict.fromkeys(wrong or shapes.values() or [_not_quantised(declared)]))
    problems: list[Problem] = []
    split: dict[tuple[str, int, int], tuple[Module, Divisibility, TensorForm]] = {}
    for layer in layers:
        for attribute, matrices in layer.weights().items():
            scheme = _agreed(matrices, found, problems)
            if scheme is not None:
                layer.adopt(attribute, scheme)
                problems += _wrong_grids(scheme, matrices, modules)
                _note_splits(scheme, matrices, modules, split)
    problems += _misaligned(split, conditions)
    if problems:
        raise QuantizationError(dict.fromkeys(problems))
    labels = Counter(scheme.label for scheme in found.schemes.values())
    listed = [*declared.excluded.entries, *(entry for group in declared.groups if group.names for entry in group.names.entries)]
    entries = tuple(Listed(entry, found.matched[entry]) for entry in sorted({*listed}))
    return Quantization(declared.method, tuple(sorted(labels.items())), entries, tuple(found.undeclared))


def _wrong_shapes(mapping: rules.Mapping, catalog: Catalog) -> dict[str, Problem]:
    """By name, the problems of tensors that their rule cannot divide."""
    found = {}
    for tensor in catalog.tensors:
        rule = mapping.by_template.get(template(tensor.name)[0])
        wrong = None if rule is None else rule.wrong_shape(tensor.shape)
        if wrong is not None:
            found[tensor.name] = shape_problem(tensor, wrong)
    return found


def _not_quantised(declared: Declared) -> Problem:
    return Problem(
        QuantFault.CONTRADICTION,
        f"the weights are declared to be quantised by {declared.method}, and no tensor is",
        file="config.json",
        expected="quantised tensors",
        actual="plain ones",
        fix="take the declaration out of the configuration, or the weights that belong to it",
    )


def quantise_inline(model: nn.Module, method: str) -> Quantization:
    """Lets every linear layer and expert hold FP8 derived from its plain weights, but for those that stay plain."""
    scheme = inline_scheme(method)
    count = 0
    for layer in model.modules():
        if not isinstance(layer, Quantisable):
            continue
        for attribute, matrices in layer.weights().items():
            if not any(stays_plain(matrix.slot) for matrix in matrices):
                layer.adopt(attribute, scheme, made=True)
                count += len(matrices)
    # The count is this rank's; with expert parallelism all ranks hold equally many, and agree on it.
    return Quantization(method, ((scheme.label, count),))


def is_inline(requested: str | None) -> bool:
    """Whether plain weights are to be quantised while they are loaded."""
    return requested in GRIDS


class _LinearSlots:
    """The slots of layers that can be quantised, on all ranks: an expert's as soon as any of its layer's is here."""

    def __init__(self, layers: Iterable[Quantisable], experts_only: bool) -> None:
        slots = (matrix.slot for layer in layers for matrices in layer.weights().values() for matrix in matrices)
        self._own = {slot for slot in slots if ".experts." in slot or not experts_only}
        self._experts = {_without_expert(slot) for slot in self._own if ".experts." in slot}

    def __contains__(self, slot: object) -> bool:
        return slot in self._own or (isinstance(slot, str) and ".experts." in slot and _without_expert(slot) in self._experts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


def _without_expert(slot: str) -> tuple[str, str]:
    """``layers.3.experts.17.gate`` without the expert's number."""
    before, _, rest = slot.partition(".experts.")
    return before, rest.partition(".")[2]


def _agreed(matrices: tuple[Matrix, ...], found: Recognised, problems: list[Problem]) -> Scheme | None:
    """The one scheme of matrices that run as one; None where all are plain, or where they disagree (a problem)."""
    schemes: dict[Scheme | None, str] = {}
    for matrix in matrices:
        module = found.modules.get(matrix.slot)
        # A module without tensors is missing, which the plan reports; it is no disagreement.
        if module is not None:
            schemes.setdefault(found.schemes.get(matrix.slot), module.raw)
    if len(schemes) > 1:
        module = found.modules[matrices[0].slot]
        shown = "; ".join(f"{raw}: {'plain' if s is None else _shown(s)}" for s, raw in schemes.items())
        problems.append(
            Problem(
                QuantFault.FUSED_DISAGREE,
                "runs as one with others that are quantised differently",
                file=module.file,
                tensor=module.raw,
                expected="one scheme",
                actual=shown,
                fix="quantise all of them alike, or none",
            )
        )
        return None
    return next(iter(schemes), None)


def _shown(scheme: Scheme) -> str:
    return f"{scheme.label} ({', '.join(f'{form.name} {form.dtype}' for form in scheme.forms)})"


def _wrong_grids(scheme: Scheme, matrices: tuple[Matrix, ...], modules: Mapping[str, Module]) -> Iterator[Problem]:
    """Tensors whose shape does not follow from scheme and model."""
    for matrix in matrices:
        module = modules.get(matrix.slot)
        if module is None:
            continue
        for form in scheme.forms:
            stored, shape = module.stored.get(form.name), form.shape(matrix)
            rows = form.along(ROWS)
            if module.cut and rows is not None and matrix.shape[ROWS] % rows.per:
                yield Problem(
                    QuantFault.WRONG_GRID,
                    "holds several matrices one above another, and a scale stands for rows of two of them",
                    file=module.file,
                    tensor=module.raw,
                    expected=f"a multiple of {rows.per} rows a matrix",
                    actual=f"{matrix.shape[ROWS]} rows",
                    fix="store the matrices apart, or quantise them with smaller blocks",
                )
            if stored is None or stored.shape == shape:
                continue
            fix = _guess(form, matrix, stored.shape)
            yield Problem(
                QuantFault.WRONG_GRID,
                f"does not have the shape that {scheme.label} gives a matrix {list(matrix.shape)}",
                file=module.file,
                tensor=module.tensor(form.name),
                expected=str(list(shape)),
                actual=str(list(stored.shape)),
                fix=fix,
            )


def _guess(form: TensorForm, matrix: Matrix, found: Shape) -> str:
    """What a wrong shape hints at."""
    shape = form.shape(matrix)
    if len(shape) > 1 and found == shape[::-1]:
        return "the two dimensions look exchanged"
    if len(found) == len(shape):
        for dim, size, wanted in zip(form.dims, found, shape, strict=True):
            if isinstance(dim, Along) and dim.per > 1 and 0 < size != wanted:
                name = ("rows", "columns")[dim.axis]
                return f"declared are {dim.per} {name} to an element; this looks like {-(-matrix.shape[dim.axis] // size)}"
    return "check that config.json belongs to these weights"


def _note_splits(
    scheme: Scheme, matrices: tuple[Matrix, ...], modules: Mapping[str, Module], split: dict[tuple[str, int, int], Any]
) -> None:
    """Notes dimensions that the ranks would cut within an element, once for equal layers."""
    for matrix in matrices:
        module = modules.get(matrix.slot)
        if module is None:
            continue
        for form in scheme.forms:
            for along in split_units(form, matrix):
                size = matrix.shape[along.axis]
                key = (template(matrix.slot)[0], along.axis, along.per)
                name = ("rows", "columns")[along.axis]
                whole = Divisibility(f"units of {along.per} {name}", size // along.per if size % along.per == 0 else 0)
                split.setdefault(key, (module, whole, form))


def _misaligned(
    split: Mapping[tuple[str, int, int], tuple[Module, Divisibility, TensorForm]], conditions: Iterable[Divisibility]
) -> Iterator[Problem]:
    units = [divides for _, divides, _ in split.values()]
    sizes = [] if any(d.size == 0 for d in units) else valid_sizes([*conditions, *units])
    for (_, axis, per), (module, divides, form) in sorted(split.items()):
        name = ("rows", "columns")[axis]
        yield Problem(
            QuantFault.MISALIGNED,
            f"{per} {name} of the matrix share an element, which the ranks would cut",
            file=module.file,
            tensor=module.tensor(form.name),
            expected=f"tp_size one of {sizes}" if sizes else f"a matrix whose {name} are a multiple of {per}",
            actual=f"{divides.size} such elements" if divides.size else f"{name} that are no multiple",
            fix="choose another number of tensor-parallel ranks" if sizes else "this matrix cannot be loaded in this format",
        )
