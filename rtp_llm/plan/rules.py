"""The checkpoint's side of the plan: a family's mapping, as data.

A raw name with its numbers taken out is its *template* (``model.layers.{}.mlp.up_proj.weight``), and templates are
dictionary keys, so that looking up 91,000 names costs 91,000 look-ups whatever the number of rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from typing import Protocol

from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.ops import Op

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")


def template(name: str) -> tuple[str, tuple[int, ...]]:
    """A name's template and numbers: ``a.3.b`` gives ``("a.{}.b", (3,))``.  Only whole dotted parts are numbers."""
    parts = _NUMBER.split(name)
    return "{}".join(parts[0::2]), tuple(map(int, parts[1::2]))


@dataclass(frozen=True, slots=True)
class Provision:
    """A slot that a raw tensor provides, and the ops in between, in the order of application."""

    slot: str
    ops: tuple[Op, ...] = ()


class AnyRule(Protocol):
    """What a raw tensor whose name fits the template ``raw`` provides."""

    @property
    def raw(self) -> str:
        """The raw name's template."""

    @property
    def slot(self) -> str:
        """The template of the slots it provides, for naming the raw tensor that a missing slot should come from."""

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterable[Provision]:
        """Provisions of the tensor with these ``numbers`` in its name and this shape."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One raw tensor, one slot: the numbers of the raw name go into the slot's name in order."""

    raw: str
    slot: str
    ops: tuple[Op, ...] = ()

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterable[Provision]:
        return (Provision(self.slot.format(*numbers), self.ops),)


@dataclass(frozen=True, slots=True)
class Skip:
    """Raw tensors that are not loaded, by template, and why: named in the plan, never silent."""

    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class Mapping:
    """A family's rules and skips; two for one template are a mistake in the family."""

    rules: tuple[AnyRule, ...]
    skips: tuple[Skip, ...] = ()
    by_template: AbstractMapping[str, AnyRule] = field(init=False, repr=False, compare=False)
    skip_reasons: AbstractMapping[str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = {rule.raw: rule for rule in self.rules}
        reasons = {skip.raw: skip.reason for skip in self.skips}
        assert len(rules) == len(self.rules) and not rules.keys() & reasons.keys(), "a template with two rules"
        object.__setattr__(self, "by_template", rules)
        object.__setattr__(self, "skip_reasons", reasons)

    def raw_names(self, slot: str) -> tuple[str, ...]:
        """The raw names from which ``slot`` could come, in the order of the rules; empty where no rule provides it."""
        key, numbers = template(slot)
        return tuple(rule.raw.format(*numbers) for rule in self.rules if rule.slot == key)
