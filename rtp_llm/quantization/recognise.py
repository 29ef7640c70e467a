"""Recognises quantised tensors of a checkpoint, and compares them with the declaration.

A weight's dtype and the tensors beside it say whether it is quantised.  Lists of exclusions are often wrong (prefixes, fused
names), so they only serve as a check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.errors import Problem
from rtp_llm.plan import rules
from rtp_llm.plan.dtypes import CASTABLE
from rtp_llm.plan.ops import Source
from rtp_llm.plan.rules import Companion, Rule, Skip, template
from rtp_llm.quantization.companions import COMPANIONS
from rtp_llm.quantization.declared import Declared
from rtp_llm.quantization.faults import QuantFault
from rtp_llm.quantization.scheme import Finding, Misread, Scheme, Spec, Stored

#: Names of scales of the KV cache and of attention, below an attention block.
_KV = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_output_scale")
_KV_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_KV_REASON = "a scale for a quantised KV cache; the cache is kept in the model's dtype, and needs none"


def with_companions(mapping: rules.Mapping, companions: Iterable[Companion]) -> rules.Mapping:
    """``mapping`` with a rule for each companion of every weight, and skips for the scales of KV caches."""
    known = {*mapping.by_template, *mapping.skip_reasons, *mapping.refusals}
    companions = tuple(companions)
    found = (rule.beside(companion) for rule in mapping.rules for companion in companions)
    more = [rule for rule in found if rule is not None and rule.raw not in known]
    skips = [Skip(raw, _KV_REASON) for rule in mapping.rules for raw in _cache_scales(rule) if raw not in known]
    return rules.Mapping((*mapping.rules, *more), (*mapping.skips, *skips), mapping.refused, mapping.skipped_layers)


def _cache_scales(rule: Rule) -> Iterator[str]:
    """Names of KV cache scales in the attention block whose output weight ``rule`` provides."""
    parent, _, leaf = rule.raw.removesuffix(".weight").rpartition(".")
    if leaf == "o_proj" and rule.tensor == "weight":
        yield from (f"{parent}.{name}" for name in _KV)
        yield from (f"{parent}.{one}.{name}" for one in _KV_PROJECTIONS for name in (*_KV, "output_scale"))


@dataclass(slots=True)
class Module:
    """The tensors of one logical module: its name in the checkpoint, and what is stored under each name after it.

    ``stacked``: they are parts of tensors that hold all experts.
    """

    raw: str
    file: str
    stored: dict[str, Stored] = field(default_factory=dict)
    stacked: bool = False

    @property
    def cut(self) -> bool:
        """Whether its tensors are parts of tensors with other modules."""
        return any(stored.whole is not None for stored in self.stored.values())

    def tensor(self, name: str) -> str:
        """The checkpoint's name of the module's tensor ``name``; the module's name if that is empty."""
        if not name or (self.stacked and name == "weight"):
            return self.raw
        return self.raw + _behind(name, self.stacked)

    def quantised(self) -> bool:
        """Whether the names of its tensors, or the dtype of its weight, say so."""
        weight = self.stored.get("weight")
        if weight is not None and weight.dtype not in _PLAIN:
            return True
        return not self.stored.keys() <= _PLAIN_NAMES


_PLAIN = frozenset(CASTABLE.values())
_PLAIN_NAMES = frozenset({"weight", "bias"})


@dataclass(slots=True)
class Recognised:
    """``schemes`` of all quantised modules, by slot without ``.weight``.  ``matched``: modules that each entry of a list matched.
    ``undeclared``: plain modules that the declaration does not mention."""

    schemes: dict[str, Scheme] = field(default_factory=dict)
    modules: dict[str, Module] = field(default_factory=dict)
    matched: Counter[str] = field(default_factory=Counter)
    undeclared: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def modules_of(mapping: rules.Mapping, tensors: Iterable[TensorInfo]) -> dict[str, Module]:
    """The modules of a checkpoint by their slot.  The plan refuses tensors that no rule knows."""
    found: dict[str, Module] = {}
    of_interest = {"weight", "bias", *COMPANIONS}
    for tensor in tensors:
        key, numbers = template(tensor.name)
        rule = mapping.by_template.get(key)
        if rule is None or rule.tensor not in of_interest or mapping.skip_reason(key, numbers) or rule.wrong_shape(tensor.shape):
            continue
        dtype = DTYPES[tensor.dtype].torch_name or tensor.dtype
        whole = tensor.shape if rule.divides(tensor.shape) else None
        for provision in rule.provide(numbers, tensor.shape):
            at, _, name = provision.slot.rpartition(".")
            module = found.get(at)
            if module is None:
                module = found[at] = Module(_module_name(rule, tensor.name), tensor.file, stacked=bool(rule.experts))
            module.stored[name] = Stored(dtype, Source(tensor.name, tensor.shape, provision.ops).slot_shape, whole)
    return found


def _module_name(rule: Rule, name: str) -> str:
    """The module of the tensor ``name``, as the checkpoint calls it."""
    if not rule.experts:
        return name.rpartition(".")[0]
    return name.removesuffix(".weight").removesuffix(_behind(rule.tensor, True))


def _behind(name: str, stacked: bool) -> str:
    return COMPANIONS.get(name, Companion(name)).behind(stacked)


def recognise(declared: Declared, modules: Mapping[str, Module], linear: Collection[str]) -> Recognised:
    """Finds the scheme of each module, and compares it with the declaration.

    ``linear``: the slots of layers that can be quantised.  Others are plain, or refused.
    """
    found = Recognised(modules={**modules})
    built: dict[tuple[object, ...], Scheme | Finding] = {}
    for slot, module in modules.items():
        quantised = module.quantised()
        if slot not in linear:
            found.matched.update(declared.excluded.matching(module.raw))
            if quantised:
                what = "is quantised, and its layer is of a kind that cannot be"
                found.problems.append(_problem(module, Finding(QuantFault.UNSUPPORTED_LAYER, "", what, "a plain weight", _kinds(module))))
            continue
        group, entries = declared.group_of(module.raw)
        found.matched.update(entries)
        if not quantised:
            _plain(declared, module, None if group is None else group.spec, found)
        elif group is None:
            _excluded(module, entries, found)
        else:
            key = _signature(group.spec, module)
            if key not in built:
                try:
                    built[key] = group.spec.build(module.stored)
                except Misread as misread:
                    built[key] = misread.finding
            scheme = built[key]
            if isinstance(scheme, Finding):
                found.problems.append(_problem(module, scheme))
            else:
                found.schemes[slot] = scheme
    return found


def _signature(spec: Spec, module: Module) -> tuple[object, ...]:
    """What a scheme depends on: names, dtypes, and the shapes of all but whole matrices.  The order of tensors is the same in
    all modules."""
    return (
        id(spec),
        *[
            (name, stored.dtype, len(stored.shape) if len(stored.shape) > 1 else stored.shape == (1,), stored.whole)
            for name, stored in module.stored.items()
        ],
    )


def _plain(declared: Declared, module: Module, spec: Spec | None, found: Recognised) -> None:
    if spec is None:
        return
    if declared.complete:
        what = f"is declared to be {spec.label}, and is stored plain"
        found.problems.append(_problem(module, Finding(QuantFault.CONTRADICTION, "weight", what, "quantised tensors", _kinds(module))))
    else:
        found.undeclared.append(module.raw)


def _excluded(module: Module, entries: tuple[str, ...], found: Recognised) -> None:
    what = f"is excluded from quantisation by {', '.join(entries)}" if entries else "is named by no group of the declaration"
    finding = Finding(QuantFault.CONTRADICTION, "", f"{what}, and its tensors are quantised"[:300], "a plain weight", _kinds(module))
    found.problems.append(_problem(module, finding))


def _kinds(module: Module) -> str:
    return ", ".join(f"{name} {s.dtype}" for name, s in sorted(module.stored.items()) if name != "bias")


def _problem(module: Module, finding: Finding) -> Problem:
    return Problem(
        finding.fault,
        finding.what,
        file=module.file,
        tensor=module.tensor(finding.tensor),
        expected=finding.expected,
        actual=finding.actual,
        fix=finding.fix or "check that config.json belongs to these weights",
    )
