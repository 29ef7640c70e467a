"""The checkpoint's side of the plan: a family's mapping, as data.

A raw name with its numbers taken out is its *template* (``model.layers.{}.mlp.up_proj.weight``), and templates are
dictionary keys, so that looking up 91,000 names costs 91,000 look-ups whatever the number of rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from typing import Protocol

from rtp_llm.errors import PlanError, internal
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Op


def template(name: str) -> tuple[str, tuple[int, ...]]:
    """A name's template and numbers: ``a.3.b`` gives ``("a.{}.b", (3,))``.  Only whole dotted parts are numbers."""
    parts, numbers = name.split("."), []
    for i, part in enumerate(parts):
        if part.isdecimal():
            numbers.append(int(part))
            parts[i] = "{}"
    return ".".join(parts), tuple(numbers)


@dataclass(frozen=True, slots=True)
class Provision:
    """A slot that a raw tensor provides, and the ops in between, in the order of application."""

    slot: str
    ops: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a rule cannot divide a tensor: the fault, what is wrong, and the shape that it takes."""

    fault: PlanFault
    what: str
    expected: str


class AnyRule(Protocol):
    """What a raw tensor whose name fits the template ``raw`` provides."""

    @property
    def raw(self) -> str:
        """The raw name's template."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The templates of the slots it provides, for naming the raw tensor that a missing slot should come from.

        The numbers of the raw name come first in them.
        """

    def misfit(self, shape: Shape) -> Misfit | None:
        """Why a tensor of this shape cannot provide anything; None where it can."""

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterable[Provision]:
        """Provisions of the tensor with these ``numbers`` in its name and this shape, which is no misfit."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One raw tensor, one slot: the numbers of the raw name go into the slot's name in order."""

    raw: str
    slot: str
    ops: tuple[Op, ...] = ()

    @property
    def slots(self) -> tuple[str, ...]:
        return (self.slot,)

    def misfit(self, shape: Shape) -> Misfit | None:
        return None

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterable[Provision]:
        return (Provision(self.slot.format(*numbers), self.ops),)


@dataclass(frozen=True, slots=True)
class Skip:
    """Raw tensors that are not loaded, by template, and why: named in the plan, never silent."""

    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class SkipLayers:
    """Whole layers that are not loaded, and why: all names below ``at`` (a template that ends with the layer's number) whose
    first number is from ``start`` to before ``stop``, whatever other rules say of them."""

    at: str
    start: int
    stop: int
    reason: str

    def covers(self, key: str, numbers: tuple[int, ...]) -> bool:
        """Whether the name with this template and these numbers belongs to such a layer."""
        return key.startswith(f"{self.at}.") and self.start <= numbers[0] < self.stop


@dataclass(frozen=True, slots=True)
class Mapping:
    """A family's rules and skips; two for one template are a mistake in the family.

    ``refused``: names that are known to mean something else than a reader might think, each with what it is; they stay
    unexpected, and the message says why.
    """

    rules: tuple[AnyRule, ...]
    skips: tuple[Skip, ...] = ()
    refused: tuple[Skip, ...] = ()
    skipped_layers: SkipLayers | None = None
    by_template: AbstractMapping[str, AnyRule] = field(init=False, repr=False, compare=False)
    by_slot: AbstractMapping[str, tuple[AnyRule, ...]] = field(init=False, repr=False, compare=False)
    skip_reasons: AbstractMapping[str, str] = field(init=False, repr=False, compare=False)
    refusals: AbstractMapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = {rule.raw: rule for rule in self.rules}
        reasons = {skip.raw: skip.reason for skip in self.skips}
        refusals = {refused.raw: refused.reason for refused in self.refused}
        stated = Counter([*(rule.raw for rule in self.rules), *(skip.raw for skip in (*self.skips, *self.refused))])
        if len(stated) != stated.total():
            twice = [raw for raw, times in stated.items() if times > 1]
            raise PlanError([internal(PlanFault.INTERNAL, "the mapping has two rules for it", tensor=raw) for raw in twice])
        by_slot: dict[str, tuple[AnyRule, ...]] = {}
        for rule in self.rules:
            for slot in rule.slots:
                by_slot[slot] = (*by_slot.get(slot, ()), rule)
        object.__setattr__(self, "by_template", rules)
        object.__setattr__(self, "by_slot", by_slot)
        object.__setattr__(self, "skip_reasons", reasons)
        object.__setattr__(self, "refusals", refusals)

    def skip_reason(self, key: str, numbers: tuple[int, ...]) -> str | None:
        """Why the raw tensor with this template and these numbers is not loaded; None where no skip names it."""
        layers = self.skipped_layers
        return layers.reason if layers is not None and layers.covers(key, numbers) else self.skip_reasons.get(key)

    def raw_names(self, slot: str) -> tuple[str, ...]:
        """The raw names from which ``slot`` could come, in the order of the rules; empty where no rule provides it."""
        key, numbers = template(slot)
        return tuple(rule.raw.format(*numbers) for rule in self.by_slot.get(key, ()))
