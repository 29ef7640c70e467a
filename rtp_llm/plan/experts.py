"""How checkpoints store experts: a tensor for each expert, or all experts of a layer stacked in one.

A family's mapping states the spellings that occur (:class:`ExpertNames`); :func:`expert_rules` makes rules of them; and
:func:`expert_layouts` says which of them a checkpoint uses, layer by layer and weight by weight, since some checkpoints mix.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from rtp_llm.plan import rules
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Op, Rows, Select, Transpose
from rtp_llm.plan.rules import AnyRule, Misfit, Provision, Rule, Skip, template

#: The logical experts of a layer; what comes before is the layer's number, then the expert's.
_SLOT = "layers.{}.experts.{}"
#: The matrices of one expert, as slots name them.
_PARTS = ("gate", "up", "down")
#: The dimensions of tensors beside stacked weights that do not lie as the weights do: experts come first, then rows, whether or not
#: the weights are transposed (biases; blocks and scales of gpt-oss's MXFP4).
_BESIDE: Mapping[str, int] = {"bias": 2, "blocks": 4, "scales": 3}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a checkpoint spells the experts of a layer.

    ``at`` is the template of what holds them, with one number, the layer's (``model.layers.{}.mlp.experts``).  Below it,
    with ``.weight`` behind, stand ``{e}.{gate}``, ``{e}.{up}`` and ``{e}.{down}`` of each expert ``e``; or, with or without
    ``.weight``, all experts stacked: ``{gate_up}`` (gate above up), or ``{gate}`` and ``{up}`` apart, and ``{down}``.

    ``transposed``: the orientation of *stacked* tensors, which their shape cannot tell where sizes happen to be equal.
    Plain is ``[experts, out, in]``, that is gate_up ``[E, 2I, H]`` and down ``[E, H, I]``; transposed is ``[experts, in, out]``.
    ``alternating``: in ``{gate_up}`` rows of gate and up take turns, and stay so (gpt-oss); there are stacks alone then, with biases
    ``{gate_up}_bias [E, 2I]`` and ``{down}_bias [E, H]``.
    """

    at: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up: str = "gate_up_proj"
    transposed: bool = False
    alternating: bool = False


@dataclass(frozen=True, slots=True)
class StackedRule:
    """A tensor that holds ``parts`` of all ``count`` experts of a layer: ``[count, rows of all parts, columns]``, or with the
    last two dimensions exchanged where ``transposed``.  The parts stand one above another and have equally many rows.

    ``tensor``: which of a part's tensors it holds, its weights or what stands beside them; ``dims``: of the tensor.
    """

    raw: str
    parts: tuple[str, ...]
    count: int
    transposed: bool = False
    tensor: str = "weight"
    dims: int = 3

    @property
    def slots(self) -> tuple[str, ...]:
        return tuple(f"{_SLOT}.{part}.{self.tensor}" for part in self.parts)

    @property
    def weights(self) -> str:
        """The template of the weights that it is, or stands beside."""
        return self.raw.removesuffix(suffix_beside(self.tensor))

    def beside(self, tensor: str) -> StackedRule:
        """The rule for the ``tensor`` beside weights."""
        raw, dims = f"{self.raw}{suffix_beside(tensor)}", _BESIDE.get(tensor)
        return replace(self, raw=raw, tensor=tensor, transposed=self.transposed and dims is None, dims=dims or 3)

    def misfit(self, shape: Shape) -> Misfit | None:
        size = "size" if len(self.parts) == 1 else f"{len(self.parts)} * size"
        rest = {2: size, 3: f"{size}, in", 4: f"{size}, blocks, bytes"}[self.dims]
        expected = f"[{self.count} experts, {'in, ' + size if self.transposed else rest}]"
        if len(shape) == self.dims and shape[0] != self.count:
            return Misfit(PlanFault.EXPERT_COUNT, f"holds {shape[0]} experts, and config.json says {self.count}", expected)
        if len(shape) != self.dims or shape[2 if self.transposed else 1] % len(self.parts):
            return Misfit(PlanFault.SOURCE_UNCOVERED, "does not have the form of stacked experts", expected)
        return None

    def provide(self, numbers: tuple[int, ...], shape: Shape) -> Iterator[Provision]:
        rows = shape[2 if self.transposed else 1] // len(self.parts)
        turn: tuple[Op, ...] = (Transpose(),) if self.transposed else ()
        cuts: list[tuple[Op, ...]] = [(*turn, Rows(i * rows, rows)) for i in range(len(self.parts))] if len(self.parts) > 1 else [turn]
        (layer,) = numbers
        for expert in range(self.count):
            select = Select(expert)
            for part, cut in zip(self.parts, cuts, strict=True):
                yield Provision(f"layers.{layer}.experts.{expert}.{part}.{self.tensor}", (select, *cut))


def suffix_beside(tensor: str) -> str:
    """What the name of stacked weights has behind it in that of the ``tensor`` beside them: ``_scale_inv`` as transformers calls the
    scales of blocks, else the whole name; nothing for the weights themselves."""
    return {"weight": "", "weight_scale_inv": "_scale_inv"}.get(tensor, f"_{tensor}")


def expert_rules(count: int, *names: ExpertNames) -> tuple[AnyRule, ...]:
    """Rules for every spelling of ``count`` experts a layer; that of the first names is the one that messages propose."""
    return tuple(rule for one in names for rule in _rules(count, one))


def _rules(count: int, names: ExpertNames) -> Iterator[AnyRule]:
    raw = {"gate": names.gate, "up": names.up, "down": names.down}
    if names.alternating:
        for name, part in ((names.gate_up, "gate_up"), (names.down, "down")):
            rule = StackedRule(f"{names.at}.{name}", (part,), count, names.transposed)
            yield from (rule, rule.beside("bias"))
        return
    for part in _PARTS:
        yield Rule(f"{names.at}.{{}}.{raw[part]}.weight", f"{_SLOT}.{part}.weight")
    stacked = [(names.gate_up, ("gate", "up")), *((raw[part], (part,)) for part in _PARTS)]
    for name, parts in stacked:
        for suffix in ("", ".weight"):
            yield StackedRule(f"{names.at}.{name}{suffix}", parts, count, names.transposed)


def swapped_names(*names: ExpertNames) -> tuple[Skip, ...]:
    """Names of tensors that hold up above gate: of equal shape, so only the name tells, and never taken for the other."""
    reason = "it holds up before gate by its name, and this model takes gate before up: swap the halves and rename it"
    return tuple(Skip(f"{one.at}.{name}", reason) for one in names for name in ("up_gate_proj", "up_gate_proj.weight"))


class ExpertLayout(Enum):
    """How a checkpoint holds one weight of a layer's experts."""

    PER_EXPERT = "a tensor for each expert"
    STACKED = "all experts in one tensor for each part"
    MIXED = "neither for all of its parts"


#: What runs as one weight, and of which parts it is made: it is stacked only if all of them are.
_WEIGHTS: Mapping[str, frozenset[str]] = {"gate_up": frozenset({"gate", "up"}), "down": frozenset({"down"})}


def expert_layouts(mapping: rules.Mapping, names: Iterable[str]) -> dict[tuple[int, str], ExpertLayout]:
    """The layout of each weight (``gate_up``, ``down``) of each layer that has experts among the raw tensors ``names``.

    The one place where this is decided.  It goes by the tensors that are there: no name with a number left open is ever
    looked up.  ``STACKED`` holds only if all parts are there and stacked, and none of them per expert as well.
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
        found = stacked if isinstance(rule, StackedRule) else single
        for slot in rule.slots:
            for part in parts_of.get(slot.split(".")[4], ()):
                found.setdefault((numbers[0], weight_of[part]), set()).add(part)
    return {key: _layout(_WEIGHTS[key[1]], stacked.get(key, set()), single.get(key, set())) for key in sorted({*stacked, *single})}


def _layout(parts: frozenset[str], stacked: set[str], single: set[str]) -> ExpertLayout:
    if not stacked:
        return ExpertLayout.PER_EXPERT
    return ExpertLayout.STACKED if stacked == parts and not single else ExpertLayout.MIXED
