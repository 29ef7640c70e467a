"""How checkpoints store experts: a tensor for each expert, or all experts of a layer stacked in one.

A family's mapping states the spellings that occur (:class:`ExpertNames`).  :func:`expert_rules` turns them into rules.
:func:`expert_layouts` finds which of them a checkpoint uses, by layer and weight, since some checkpoints mix them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from rtp_llm.plan import rules
from rtp_llm.plan.ops import Transpose
from rtp_llm.plan.rules import Companion, Part, Rule, Skip, template

#: The slots of an expert; the numbers are the layer's and the expert's.
_SLOT = "layers.{}.experts.{}"
#: The matrices of one expert, as slots name them.
_PARTS = ("gate", "up", "down")
#: Biases of stacked experts, ``[experts, rows]``, whether or not the weights are transposed.
_BIAS = Companion("bias", stacked=2, upright=True)


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint spells the experts of a layer.

    ``at``: the template of their module, with one number, the layer's (``model.layers.{}.mlp.experts``).  Names below it are
    either those of each expert ``e``, ending in ``.weight``: ``{e}.{gate}``, ``{e}.{up}``, ``{e}.{down}``; or those of all experts
    stacked, with or without ``.weight``: ``{gate_up}`` (gate above up), or ``{gate}`` and ``{up}``, and ``{down}``.

    ``transposed``: the orientation of *stacked* tensors; shapes do not show it where sizes are equal.
    Plain is ``[experts, out, in]``, that is gate_up ``[E, 2I, H]`` and down ``[E, H, I]``; transposed is ``[experts, in, out]``.
    ``alternating``: in ``{gate_up}`` rows of gate and up alternate, and stay so (gpt-oss).  All experts are stacked then, with
    biases ``{gate_up}_bias [E, 2I]`` and ``{down}_bias [E, H]``.
    """

    at: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    transposed: bool = False
    alternating: bool = False


def expert_rules(count: int, *names: ExpertNames) -> tuple[Rule, ...]:
    """Rules for every spelling of ``count`` experts a layer; messages propose that of the first names."""
    return tuple(rule for one in names for rule in _rules(count, one))


def _rules(count: int, names: ExpertNames) -> Iterator[Rule]:
    raw = {"gate": names.gate, "up": names.up, "down": names.down}

    def stacked(name: str, *parts: str) -> Rule:
        ops = (Transpose(),) if names.transposed else ()
        return Rule(f"{names.at}.{name}", f"{_SLOT}.*.weight", ops, tuple(map(Part, parts)), experts=count)

    if names.alternating:
        for name, part in ((names.gate_up, "gate_up"), (names.down, "down")):
            rule = stacked(name, part)
            yield from filter(None, (rule, rule.beside(_BIAS)))
        return
    for part in _PARTS:
        yield Rule(f"{names.at}.{{}}.{raw[part]}.weight", f"{_SLOT}.{part}.weight")
    for name, parts in ((names.gate_up, ("gate", "up")), *((raw[part], (part,)) for part in _PARTS)):
        for suffix in ("", ".weight"):
            yield stacked(f"{name}{suffix}", *parts)


def swapped_names(*names: ExpertNames) -> tuple[Skip, ...]:
    """Names of tensors that hold up above gate.  Their shape is that of gate above up, so only the name shows it."""
    reason = "it holds up before gate by its name, and this model takes gate before up: swap the halves and rename it"
    return tuple(Skip(f"{one.at}.{name}", reason) for one in names for name in ("up_gate_proj", "up_gate_proj.weight"))


class ExpertLayout(Enum):
    """How a checkpoint holds one weight of a layer's experts."""

    PER_EXPERT = "a tensor for each expert"
    STACKED = "all experts in one tensor for each part"
    MIXED = "neither for all of its parts"


#: The parts of each fused weight; it counts as stacked only if all of them are.
_WEIGHTS: Mapping[str, frozenset[str]] = {"gate_up": frozenset({"gate", "up"}), "down": frozenset({"down"})}


def expert_layouts(mapping: rules.Mapping, names: Iterable[str]) -> dict[tuple[int, str], ExpertLayout]:
    """The layout of each weight (``gate_up``, ``down``) of each layer that has experts among the raw tensors ``names``.

    Goes by the tensors that are there.  ``STACKED`` only if all parts are there and stacked, and none of them per expert too.
    """
    stacked: dict[tuple[int, str], set[str]] = {}
    single: dict[tuple[int, str], set[str]] = {}
    parts_of = {"gate_up": _WEIGHTS["gate_up"], **{part: frozenset({part}) for part in _PARTS}}
    weight_of = {part: weight for weight, parts in _WEIGHTS.items() for part in parts}
    for name in names:
        key, numbers = template(name)
        rule = mapping.by_template.get(key)
        if rule is None or not rule.slots[0].startswith(_SLOT):
            continue
        found = stacked if rule.experts else single
        for slot in rule.slots:
            for part in parts_of.get(slot.split(".")[4], ()):
                found.setdefault((numbers[0], weight_of[part]), set()).add(part)
    return {key: _layout(_WEIGHTS[key[1]], stacked.get(key, set()), single.get(key, set())) for key in sorted({*stacked, *single})}


def _layout(parts: frozenset[str], stacked: set[str], single: set[str]) -> ExpertLayout:
    if not stacked:
        return ExpertLayout.PER_EXPERT
    return ExpertLayout.STACKED if stacked == parts and not single else ExpertLayout.MIXED
