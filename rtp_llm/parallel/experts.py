"""Which expert lives on which expert-parallel rank.  Pure functions on integers.

Without a table, experts are split into contiguous runs in rank order; where they do not divide, low ranks hold one more.  A table
(``phy2log`` of DeepSeek's expert-parallel load balancer, EPLB) maps *physical* experts, split evenly over the ranks in order, to
*logical* ones, those of the checkpoint.  A logical expert may be on several ranks, or twice on one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rtp_llm.errors import PlanError, Problem
from rtp_llm.parallel.faults import ParallelFault

#: A ``phy2log`` table: by the number of each layer with experts, the logical expert of each physical one.
PhysicalToLogical = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """The experts of a model: ``count`` in each of the layers numbered ``layers``."""

    count: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a logical expert: the rank that holds it, and its place among that rank's experts."""

    rank: int
    place: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """Experts over ``ranks`` expert-parallel ranks, the same on all of them; checked by :func:`check_ownership`."""

    ranks: int = 1
    table: PhysicalToLogical = field(default_factory=dict)

    def held(self, layer: int, count: int) -> tuple[tuple[int, ...], ...]:
        """For each rank its logical experts of a layer with ``count`` of them, in the order of their places."""
        physical = self.table.get(layer)
        if physical is None:
            return contiguous(count, self.ranks)
        each = len(physical) // self.ranks
        return tuple(physical[rank * each : (rank + 1) * each] for rank in range(self.ranks))


def contiguous(count: int, ranks: int) -> tuple[tuple[int, ...], ...]:
    """``count`` experts in contiguous runs; the first ``count % ranks`` ranks hold one more than the others."""
    each, more = divmod(count, ranks)
    starts = [rank * each + min(rank, more) for rank in range(ranks + 1)]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False))


def replicas(held: tuple[tuple[int, ...], ...], count: int) -> tuple[tuple[Replica, ...], ...]:
    """For each of ``count`` logical experts its copies, in the order of ranks and places."""
    found: list[list[Replica]] = [[] for _ in range(count)]
    for rank, experts in enumerate(held):
        for place, expert in enumerate(experts):
            found[expert].append(Replica(rank, place))
    return tuple(map(tuple, found))


def check_ownership(ownership: Ownership, experts: ExpertLayers | None) -> None:
    """Refuses ranks without experts, and tables that do not fit the model or the ranks.

    Raises:
        PlanError: with everything that is wrong, each with the values that work.
    """
    if experts is None:
        problems = [_no_experts(ownership)] if ownership.ranks > 1 or ownership.table else []
    elif ownership.ranks > experts.count:
        problems = [
            Problem(
                ParallelFault.TOO_MANY_EXPERT_RANKS,
                f"{experts.count} experts leave some of {ownership.ranks} expert-parallel ranks without any",
                expected=f"ep_size from 1 to {experts.count}",
                actual=str(ownership.ranks),
            )
        ]
    elif ownership.table:
        problems = [p for layer in sorted({*experts.layers, *ownership.table}) for p in _check_row(ownership, experts, layer)]
    else:
        problems = []
    if problems:
        raise PlanError(problems)


def _no_experts(ownership: Ownership) -> Problem:
    return Problem(
        ParallelFault.NO_EXPERTS,
        "the model has no experts to divide over expert-parallel ranks",
        expected="ep_size 1 and no expert table",
        actual=f"ep_size {ownership.ranks}" + (" and an expert table" if ownership.table else ""),
        fix="use tp_size for a dense model",
    )


def _check_row(ownership: Ownership, experts: ExpertLayers, layer: int) -> list[Problem]:
    """The problems of a layer's row."""
    row = ownership.table.get(layer)
    if row is None or layer not in experts.layers:
        expected = "a row for each layer with experts" if row is None else "rows for layers with experts only"
        return [_bad_table(layer, "the table and the model do not have the same layers", expected, "none" if row is None else "a row")]
    problems = []
    outside = sorted({e for e in row if not 0 <= e < experts.count})
    if outside:
        problems.append(_bad_table(layer, "logical experts that the model does not have", f"0 to {experts.count - 1}", _some(outside)))
    if len(row) % ownership.ranks:
        expected = f"a multiple of ep_size {ownership.ranks}"
        problems.append(_bad_table(layer, "physical experts cannot be divided over the ranks", expected, str(len(row))))
    absent = sorted({*range(experts.count)} - {*row})
    if absent:
        problems.append(_bad_table(layer, "logical experts that no rank would hold", "each at least once", f"never {_some(absent)}"))
    return problems


def _some(numbers: list[int]) -> str:
    """The first numbers; there may be hundreds."""
    return ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def _bad_table(layer: int, what: str, expected: str, actual: str) -> Problem:
    return Problem(
        ParallelFault.BAD_EXPERT_TABLE,
        f"layer {layer}: {what}",
        expected=expected,
        actual=actual,
        fix="make the table (phy2log) for this model and this ep_size",
    )
