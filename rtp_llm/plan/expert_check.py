"""Checks the number of experts of a checkpoint, and proposes names for missing ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.errors import Problem
from rtp_llm.plan import rules
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Source
from rtp_llm.plan.pieces import ExpertSlots
from rtp_llm.plan.rules import WrongShape, template


@dataclass(frozen=True, slots=True)
class Contradicted:
    """Layers whose number of experts is not the configuration's, by the prefixes of their slots.

    Every other problem of those slots (missing, unexpected, of another shape) follows from it and is not reported.
    """

    problems: tuple[Problem, ...]
    prefixes: frozenset[str]

    def concern(self, slot: str) -> bool:
        """Whether a slot belongs to such a layer's experts or router."""
        return bool(self.prefixes) and ".".join(slot.split(".", 3)[:3]) in self.prefixes


def contradictions(
    experts: tuple[ExpertSlots, ...], slots: Mapping[str, Source], wrong_shapes: Mapping[str, WrongShape], tensors: Mapping[str, TensorInfo]
) -> Contradicted:
    """Compares the configuration's number of experts with the routers' rows and the stacked tensors.

    Where routers agree with the configuration, experts too few or too many are problems of single tensors.
    """
    problems = [shape_problem(tensors[name], wrong) for name, wrong in wrong_shapes.items()]
    prefixes: set[str] = set()
    by_count: defaultdict[tuple[int, int], list[TensorInfo]] = defaultdict(list)
    for layer in experts:
        router = slots.get(f"{layer.router}.weight")
        shape = () if router is None else router.slot_shape
        if router is not None and shape and shape[0] != layer.count:
            by_count[layer.count, shape[0]].append(tensors[router.raw])
            prefixes |= {layer.slot, layer.router}
    for (count, stated), routers in by_count.items():
        others = f", and so do those of {len(routers) - 1} more layers" if len(routers) > 1 else ""
        problems.append(
            Problem(
                PlanFault.EXPERT_COUNT,
                f"the router chooses among {stated} experts{others}",
                file=routers[0].file,
                tensor=routers[0].name,
                expected=f"{count}, as config.json says",
                actual=str(stated),
                fix="check that config.json belongs to these weights",
            )
        )
    return Contradicted(tuple(problems), frozenset(prefixes))


def shape_problem(tensor: TensorInfo, wrong: WrongShape) -> Problem:
    """The problem of a tensor that its rule cannot divide."""
    return Problem(
        wrong.fault,
        wrong.what,
        file=tensor.file,
        tensor=tensor.name,
        expected=wrong.expected,
        actual=str(list(tensor.shape)),
        fix=wrong.fix,
    )


def proposed_names(mapping: rules.Mapping, slot: str, names: Collection[str]) -> tuple[str, ...]:
    """The raw names that a missing slot may have.

    For an expert: the spelling that the checkpoint uses for the same part of the layer's expert 0 or 1.  Where it has neither,
    and for all other slots: every spelling of the mapping.
    """
    key, numbers = template(slot)
    if len(numbers) == 2:
        for neighbour in sorted({0, 1} - {numbers[1]}):
            used = [rule for rule in mapping.by_slot.get(key, ()) if rule.raw.format(numbers[0], neighbour) in names]
            if used:
                return tuple(rule.raw.format(*numbers) for rule in used)
    return mapping.raw_names(slot)
