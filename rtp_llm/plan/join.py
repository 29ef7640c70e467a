"""Joins the checkpoint's tensors with the model's parameters by the names of slots: the result is a plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod

from rtp_llm.checkpoint.catalog import Catalog, TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES, DTYPES_BY_TORCH_NAME
from rtp_llm.errors import PlanError, Problem, internal
from rtp_llm.plan.boxes import Box, Shape, extent, whole
from rtp_llm.plan.coverage import tiles
from rtp_llm.plan.derived import DerivedPlace, DerivedTensor, DerivedTile, Transform
from rtp_llm.plan.dtypes import CASTABLE, cast_is_exact
from rtp_llm.plan.expert_check import Contradicted, contradictions, proposed_names
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Source
from rtp_llm.plan.pieces import Fill, Piece
from rtp_llm.plan.plan import Delivery, LoadPlan, ModelSide, Skipped, Target, agreement_lines, compatible, digest
from rtp_llm.plan.rules import Mapping, WrongShape, template

#: A transform takes stored values of any floating-point type.
_ANY_FLOAT = "float32"


@dataclass(slots=True)
class Provided:
    """The slots that a mapping finds in a catalogue.  ``wrong_shapes``: by name, tensors that their rule cannot divide."""

    slots: dict[str, Source] = field(default_factory=dict)
    skipped: list[Skipped] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shapes: dict[str, WrongShape] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def provide(mapping: Mapping, tensors: Iterable[TensorInfo]) -> Provided:
    """Looks up every tensor's rule; two tensors for one slot, or a tensor used twice or in part, are problems."""
    found = Provided()
    for tensor in tensors:
        key, numbers = template(tensor.name)
        reason = mapping.skip_reason(key, numbers)
        if reason is not None:
            found.skipped.append(Skipped(tensor.name, reason))
            continue
        rule = mapping.by_template.get(key)
        if rule is None:
            found.unexpected.append(tensor.name)
            continue
        wrong = rule.wrong_shape(tensor.shape)
        if wrong is not None:
            found.wrong_shapes[tensor.name] = wrong
            continue
        # A set: slots may share a tensor, such as the scale of a fused matrix.
        boxes: set[Box] = set()
        for provision in rule.provide(numbers, tensor.shape):
            source = Source(tensor.name, tensor.shape, provision.ops)
            other = found.slots.setdefault(provision.slot, source)
            if other is not source:
                found.problems.append(_doubled(tensor, provision.slot, other.raw))
            if source.ops:
                boxes.add(source.pull(whole(source.slot_shape)))
        if boxes and not tiles(tensor.shape, list(boxes)):
            found.problems.append(
                Problem(
                    PlanFault.SOURCE_UNCOVERED,
                    "its logical tensors do not cover it exactly once",
                    file=tensor.file,
                    tensor=tensor.name,
                    expected="a shape that the model's mapping can divide",
                    actual=str(list(tensor.shape)),
                )
            )
    return found


def _doubled(tensor: TensorInfo, slot: str, other: str) -> Problem:
    return Problem(
        PlanFault.DOUBLED_TENSOR,
        f"provides {slot}, which {other} provides as well",
        file=tensor.file,
        tensor=tensor.name,
        expected="one tensor",
        actual="two",
        fix="remove one of the two from the checkpoint",
    )


def join(catalog: Catalog, mapping: Mapping, model: ModelSide) -> LoadPlan:
    """Joins a catalogue without problems with one rank's model, by the rules and skips of the family's mapping.

    Returns:
        A plan; with ``problems`` where the two sides do not fit (all of them at once), which must not be carried out.

    Raises:
        PlanError: ``INTERNAL``, where the model's layers contradict themselves or each other.
    """
    tensors = {t.name: t for t in catalog.tensors}
    found = provide(mapping, catalog.tensors)
    wrong = contradictions(model.experts, found.slots, found.wrong_shapes, tensors)
    needs, wants, fills, derived, problems = _needs(model, found.slots, tensors, wrong)

    unused = {source.raw for slot, source in found.slots.items() if slot not in needs and not wrong.concern(slot)}
    unexpected = tuple(sorted([*found.unexpected, *unused]))
    absent = {
        slot: proposed_names(mapping, slot, tensors)
        for slot in sorted(slot for slot in needs if slot not in found.slots and not wrong.concern(slot))
    }
    # A slot whose tensor has a wrong shape is not missing: its shape is reported.
    absent = {slot: names for slot, names in absent.items() if not any(name in found.wrong_shapes for name in mapping.raw_names(slot))}
    problems += found.problems
    problems += wrong.problems
    problems += [_unexpected(tensors[raw], mapping) for raw in unexpected]
    problems += [_missing(slot, needs[slot], names) for slot, names in absent.items()]

    deliveries = tuple(
        sorted(
            (
                Delivery(slot, tensors[found.slots[slot].raw], found.slots[slot], box, tuple(targets))
                for (slot, box), targets in wants.items()
            ),
            key=lambda d: (d.tensor.file, d.tensor.start, d.slot, d.slot_box),
        )
    )
    model_digest = slots_digest(needs)
    return LoadPlan(
        model=model,
        catalog=catalog,
        mapping=mapping,
        slots=found.slots,
        deliveries=deliveries,
        fills=tuple(fills),
        derived=derived,
        skipped=tuple(found.skipped),
        missing=tuple(sorted((names or (slot,))[0] for slot, names in absent.items())),
        unexpected=unexpected,
        problems=tuple(sorted(problems, key=Problem.sort_key)),
        bytes_read=sum(d.nbytes for d in deliveries),
        bytes_resident=sum(prod(p.shape) * stored_bits(p.dtype) // 8 for p in model.params),
        model_digest=model_digest,
        digest=digest(agreement_lines(model, catalog.tensors, found.slots, model_digest)),
    )


def stored_bits(dtype: str) -> int:
    """Bits that an element of torch's ``dtype`` takes in memory; packed types hold several numbers in an element."""
    known = DTYPES_BY_TORCH_NAME[dtype]
    return known.bits * known.packed


def slots_digest(needs: dict[str, Shape]) -> str:
    """A hash of the model's slots and their shapes, equal on all ranks."""
    return digest(f"{slot} {list(needs[slot])}" for slot in sorted(needs))


def _needs(
    model: ModelSide,
    slots: dict[str, Source],
    tensors: dict[str, TensorInfo],
    wrong: Contradicted,
) -> tuple[dict[str, Shape], dict[tuple[str, Box], list[Target]], list[tuple[str, Fill]], dict[str, DerivedTensor], list[Problem]]:
    """One pass over the parameters: needed slots, targets by slot box, fills, derived tensors, shape and dtype problems.

    Slots of experts on other ranks are needed too, although no parameter of this rank takes them.
    """
    needs: dict[str, Shape] = {}
    wants: defaultdict[tuple[str, Box], list[Target]] = defaultdict(list)
    fills: list[tuple[str, Fill]] = []
    transforms: dict[tuple[str, Box], tuple[Transform, list[DerivedPlace]]] = {}
    problems: dict[tuple[PlanFault, str], Problem] = {}

    def fits(slot: str, shape: Shape, dtype: str, exact: bool) -> bool:
        source = slots.get(slot)
        if source is None or wrong.concern(slot):
            return False
        tensor = tensors[source.raw]
        fault = _misfit(shape, dtype, exact, source, tensor)
        if fault is not None and (fault, slot) not in problems:
            problems[fault, slot] = _describe(fault, slot, shape, dtype, source, tensor)
        return fault is None

    def need(tile: Piece | DerivedTile) -> None:
        shape = needs.setdefault(tile.slot, tile.slot_shape)
        if shape != tile.slot_shape:
            raise PlanError(
                internal(PlanFault.INTERNAL, "layers expect different shapes of it", tensor=tile.slot, actual=f"{shape}, {tile.slot_shape}")
            )

    for param in model.params:
        if not tiles(param.shape, [t.local_box for t in param.tiles]):
            raise PlanError(internal(PlanFault.INTERNAL, f"its tiles do not fill {param.shape} exactly once", tensor=param.name))
        for tile in param.tiles:
            if isinstance(tile, Fill):
                fills.append((param.name, tile))
                continue
            if isinstance(tile, DerivedTile):
                need(tile)
                if fits(tile.slot, tile.slot_shape, _ANY_FLOAT, False):
                    source = slots[tile.slot]
                    divisible = tensors[source.raw].strides is None and all(op.local for op in source.ops)
                    # An indivisible tensor is read whole and once, for everything derived from it.
                    region = tile.transform.needs(tile.output, tile.box, tile.slot_shape) if divisible else whole(tile.slot_shape)
                    _, places = transforms.setdefault((tile.slot, region), (tile.transform, []))
                    places.append(DerivedPlace(param.name, tile.local_box, tile.output, tile.box))
                continue
            if not compatible(tile.slot_box, tile.local_box):
                raise PlanError(internal(PlanFault.INTERNAL, f"a tile of it changes shape: {tile}", tensor=param.name))
            need(tile)
            if fits(tile.slot, tile.slot_shape, param.dtype, param.exact):
                wants[tile.slot, tile.slot_box].append(Target(param.name, tile.local_box))
    for layer in model.experts:
        for slot, shape, dtype in layer.slots():
            if slot not in needs:
                needs[slot] = shape
                fits(slot, shape, dtype, False)
    derived = {}
    for (slot, region), (transform, places) in transforms.items():
        name = f"{slot} {list(region)}"
        derived[name] = DerivedTensor(name, transform, region, tuple(places))
        wants[slot, region].append(Target(name, whole(extent(region))))
    return needs, wants, fills, derived, list(problems.values())


def _misfit(shape: Shape, dtype: str, exact: bool, source: Source, tensor: TensorInfo) -> PlanFault | None:
    if (source.slot_shape if source.ops else source.shape) != shape:
        return PlanFault.SHAPE_MISMATCH
    stored = DTYPES[tensor.dtype].torch_name
    if stored == dtype:
        return None
    if not (tensor.dtype in CASTABLE and dtype in CASTABLE.values()):
        return PlanFault.DTYPE_MISMATCH
    return PlanFault.PRECISION_LOST if exact and not cast_is_exact(dtype, CASTABLE[tensor.dtype]) else None


def _describe(fault: PlanFault, slot: str, shape: Shape, dtype: str, source: Source, tensor: TensorInfo) -> Problem:
    if fault is PlanFault.SHAPE_MISMATCH:
        what = "does not have the shape that config.json asks for"
        expected, actual = str(list(shape)), str(list(source.slot_shape))
        fix = "check that config.json belongs to these weights"
        if actual == str(list(shape[::-1])):
            fix = "the two dimensions look exchanged; " + fix
    elif fault is PlanFault.PRECISION_LOST:
        what = f"is stored in a dtype too narrow for {slot}"
        expected, actual = f"{dtype} or wider", tensor.dtype
        fix = "take it from the original checkpoint; casting it back does not bring back what was rounded away"
    else:
        what = f"is stored in a dtype that {slot} cannot take"
        expected, actual = f"one of {sorted(CASTABLE)}" if dtype in CASTABLE.values() else dtype, tensor.dtype
        fix = "a quantised checkpoint must say so in config.json; convert this one, or choose another"
    return Problem(fault, what, file=tensor.file, tensor=tensor.name, expected=expected, actual=actual, fix=fix)


def _unexpected(tensor: TensorInfo, mapping: Mapping) -> Problem:
    key, _ = template(tensor.name)
    return Problem(
        PlanFault.UNEXPECTED_TENSOR,
        mapping.refusals.get(key, "the model has no place for it"),
        file=tensor.file,
        tensor=tensor.name,
        expected="a tensor of this architecture, within the sizes of config.json",
        actual=f"{tensor.dtype} {list(tensor.shape)}",
        fix="check architectures and sizes in config.json; a tensor that may be left out needs a skip rule",
    )


def _missing(slot: str, shape: Shape, names: tuple[str, ...]) -> Problem:
    return Problem(
        PlanFault.MISSING_TENSOR,
        f"the model needs it ({slot}), and the checkpoint does not hold it",
        tensor=names[0] if names else slot,
        expected=str(list(shape)) + (f", also known as {', '.join(names[1:])}" if names[1:] else ""),
        actual="nothing",
        fix="the checkpoint is incomplete, or config.json belongs to another one",
    )
