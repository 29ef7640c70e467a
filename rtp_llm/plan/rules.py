"""The checkpoint's side of the plan: a family's mapping, as data.

A raw name with its numbers taken out is its *template* (``model.layers.{}.mlp.up_proj.weight``), and templates are
dictionary keys: 91,000 names take 91,000 look-ups, whatever the number of rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field, replace
from math import gcd, prod

from rtp_llm.errors import PlanError, internal
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Cut, Op, Select

#: What a weight's name ends with, in checkpoints and in slots.
_WEIGHT = ".weight"


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
class WrongShape:
    """Why a rule cannot divide a tensor; ``expected``: the shape that it takes."""

    fault: PlanFault
    what: str
    expected: str
    fix: str = "check that config.json belongs to these weights"


@dataclass(frozen=True, slots=True)
class Part:
    """One of several matrices that a tensor holds one above another.

    ``name`` replaces ``*`` in the rule's slot.  ``share``: its rows in proportion to those of the other parts, so that the same
    numbers divide the weight, its bias, and scales of one row or of many.
    """

    name: str
    share: int = 1


@dataclass(frozen=True, slots=True)
class Companion:
    """A tensor beside a weight (scales, zero points, indices), by its name behind the weight's module.

    rows: the dimension along the weight's output features; it is divided where the weight is.  None: it has no such dimension,
        and every part shares it.
    stacked: its dimensions where it holds those of all experts, the experts' own included; they come first, then output features.
    upright: there it lies so even if the weights are transposed.
    joint: what joins it to the name of stacked weights, which end in no ``.weight``; None: ``_`` and its name.
    """

    name: str
    rows: int | None = 0
    stacked: int = 3
    upright: bool = False
    joint: str | None = None

    def behind(self, stacked: bool) -> str:
        """What its name has behind that of the weight's module, or of stacked weights."""
        if not stacked:
            return f".{self.name}"
        return f"_{self.name}" if self.joint is None else self.joint


@dataclass(frozen=True, slots=True)
class Rule:
    """What a raw tensor provides: one slot, or a slot for each part of each expert that it holds.

    raw: the template of its name.
    slot: the template of the slots.  The numbers of the raw name go into it in order, then an expert's, and a part's name for ``*``.
    ops: what turns the tensor (of an expert, where it holds several) into a slot's layout.
    parts: the matrices that it holds, from the first row on; none where it holds one.
    experts: how many experts its first dimension counts; 0 where there is no such dimension.
    dims: its dimensions, where it holds experts.
    rows: the dimension that parts divide, once ``ops`` are applied; None where all of them share the whole tensor.
    """

    raw: str
    slot: str
    ops: tuple[Op, ...] = ()
    parts: tuple[Part, ...] = ()
    experts: int = 0
    dims: int = 3
    rows: int | None = 0

    @property
    def slots(self) -> tuple[str, ...]:
        """The templates of the slots, for naming the raw tensor that a missing slot should come from."""
        return tuple(self.slot.replace("*", part.name) for part in self.parts) or (self.slot,)

    @property
    def tensor(self) -> str:
        """Which of a module's tensors it is, by its name in slots: ``weight``, ``bias``, ``weight_scale``."""
        return self.slot.rpartition(".")[2]

    def beside(self, companion: Companion) -> Rule | None:
        """The rule for a companion of the weight that this rule is for.

        None where this rule is for no weight, or for one that no format quantises: transposed, or stacked under a name in ``.weight``.
        """
        module, plain = self.raw.removesuffix(_WEIGHT), self.raw.endswith(_WEIGHT)
        if not self.slot.endswith(_WEIGHT) or plain == bool(self.experts) or (plain and self.ops):
            return None
        raw, slot = f"{module}{companion.behind(bool(self.experts))}", f"{self.slot.removesuffix(_WEIGHT)}.{companion.name}"
        if not self.experts:
            return replace(self, raw=raw, slot=slot, rows=companion.rows)
        return replace(self, raw=raw, slot=slot, ops=() if companion.upright else self.ops, dims=companion.stacked)

    def wrong_shape(self, shape: Shape) -> WrongShape | None:
        """Why a tensor of this shape cannot be divided; None where it can."""
        if self.experts:
            return self._wrong_stack(shape)
        along = self._along(shape)
        turned = self._turned(shape) if len(shape) > 1 else shape
        if along is None or (along < len(turned) and turned[along] % self._total == 0):
            return None
        names, shares = ", ".join(part.name for part in self.parts), ":".join(map(str, self._shares))
        expected = f"a multiple of {self._total} in dimension {along}"
        if self.tensor in ("weight", "bias"):
            return WrongShape(PlanFault.SOURCE_UNCOVERED, f"does not hold {names} one above another, as {shares}", expected)
        what = f"holds {names} one above another, as {shares}, and an element stands for rows of two of them"
        return WrongShape(PlanFault.SOURCE_UNCOVERED, what, expected, "store the matrices apart, or quantise them with smaller blocks")

    def _wrong_stack(self, shape: Shape) -> WrongShape | None:
        size = f"{self._total} * size" if len(self.parts) > 1 else "size"
        rest = {2: size, 3: f"{size}, in", 4: f"{size}, blocks, bytes"}[self.dims]
        expected = f"[{self.experts} experts, {'in, ' + size if self.ops else rest}]"
        if len(shape) == self.dims and shape[0] != self.experts:
            return WrongShape(PlanFault.EXPERT_COUNT, f"holds {shape[0]} experts, and config.json says {self.experts}", expected)
        if len(shape) != self.dims or self._turned(shape[1:])[0] % self._total:
            return WrongShape(PlanFault.SOURCE_UNCOVERED, "does not have the form of stacked experts", expected)
        return None

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterable[Provision]:
        """Provisions of the tensor with these ``numbers`` in its name and this shape, which is not wrong."""
        if not self.experts and not self.parts:
            return (Provision(self.slot.format(*numbers), self.ops),)
        return self._divided(numbers, shape)

    def _divided(self, numbers: tuple[int, ...], shape: Shape) -> Iterator[Provision]:
        cuts = [(slot, (*self.ops, *cut)) for slot, cut in zip(self.slots, self._cuts(shape), strict=True)]
        if not self.experts:
            yield from (Provision(slot.format(*numbers), ops) for slot, ops in cuts)
        for expert in range(self.experts):
            select = Select(expert)
            for slot, ops in cuts:
                yield Provision(slot.format(*numbers, expert), (select, *ops))

    def _cuts(self, shape: Shape) -> Iterator[tuple[Op, ...]]:
        """For each slot the op that takes its part out of a tensor, or out of one expert's."""
        along = self._along(shape)
        if along is None:
            yield from ((),) * len(self.slots)
            return
        unit, start = self._turned(shape[1:] if self.experts else shape)[along] // self._total, 0
        for share in self._shares:
            yield (Cut(start * unit, share * unit, along),)
            start += share

    def divides(self, shape: Shape) -> bool:
        """Whether parts of a tensor of this shape go to different slots, and not the whole of it to all."""
        return self._along(shape) is not None

    def _along(self, shape: Shape) -> int | None:
        """The dimension that parts divide; None where there is one slot, or one number for all of them: a scale for the tensor."""
        number = prod(shape) == 1 and not self.experts and self.tensor != "weight"
        return None if len(self.parts) < 2 or number else self.rows

    def _turned(self, shape: Shape) -> Shape:
        for op in self.ops:
            shape = op.out_shape(shape)
        return shape

    @property
    def _shares(self) -> tuple[int, ...]:
        """The parts' shares in lowest terms: with 6, 2 and 2 heads of 64 rows and blocks of 128, there are 3, 1 and 1 blocks."""
        common = gcd(*(part.share for part in self.parts))
        return tuple(part.share // common for part in self.parts)

    @property
    def _total(self) -> int:
        return sum(self._shares) or 1


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

    ``refused``: names that look like known ones and mean something else; they stay unexpected, with that reason.
    """

    rules: tuple[Rule, ...]
    skips: tuple[Skip, ...] = ()
    refused: tuple[Skip, ...] = ()
    skipped_layers: SkipLayers | None = None
    by_template: AbstractMapping[str, Rule] = field(init=False, repr=False, compare=False)
    by_slot: AbstractMapping[str, tuple[Rule, ...]] = field(init=False, repr=False, compare=False)
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
        by_slot: dict[str, tuple[Rule, ...]] = {}
        for rule in self.rules:
            for slot in rule.slots:
                by_slot[slot] = (*by_slot.get(slot, ()), rule)
        object.__setattr__(self, "by_template", rules)
        object.__setattr__(self, "by_slot", by_slot)
        object.__setattr__(self, "skip_reasons", reasons)
        object.__setattr__(self, "refusals", refusals)

    def under(self, body: str, beside: str, outside: Collection[str]) -> Mapping:
        """The same with ``body`` before every raw name, or ``beside`` where its first part is one of ``outside``."""

        def at(raw: str) -> str:
            return f"{beside if raw.partition('.')[0] in outside else body}{raw}"

        layers = self.skipped_layers
        return Mapping(
            tuple(replace(rule, raw=at(rule.raw)) for rule in self.rules),
            tuple(replace(skip, raw=at(skip.raw)) for skip in self.skips),
            tuple(replace(skip, raw=at(skip.raw)) for skip in self.refused),
            layers and replace(layers, at=at(layers.at)),
        )

    def skip_reason(self, key: str, numbers: tuple[int, ...]) -> str | None:
        """Why the raw tensor with this template and these numbers is not loaded; None where no skip names it."""
        layers = self.skipped_layers
        return layers.reason if layers is not None and layers.covers(key, numbers) else self.skip_reasons.get(key)

    def raw_names(self, slot: str) -> tuple[str, ...]:
        """The raw names from which ``slot`` could come, in the order of the rules; empty where no rule provides it."""
        key, numbers = template(slot)
        return tuple(rule.raw.format(*numbers) for rule in self.by_slot.get(key, ()))
