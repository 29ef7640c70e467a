"""One rule for every way that a tensor can hold slots: alone, fused, stacked, and what stands beside each."""

from __future__ import annotations

import re

import pytest
import torch

from rtp_llm.plan.boxes import view, whole
from rtp_llm.plan.coverage import tiles
from rtp_llm.plan.ops import Source, Transpose
from rtp_llm.plan.rules import Companion, Mapping, Part, Rule, Skip

#: Grouped heads: queries are four times keys, and values like keys.
QKV = Rule("l.{}.qkv.weight", "layers.{}.*.weight", parts=(Part("q", 8), Part("k", 2), Part("v", 2)))
STACK = Rule("l.{}.gate_up", "layers.{}.experts.{}.*.weight", (Transpose(),), (Part("gate"), Part("up")), experts=3)

BLOCKS = Companion("scale", joint="_scale")
ALIKE = Companion("input_scale", rows=None)
TURNED = Companion("qweight", rows=1)
UPRIGHT = Companion("bias", stacked=2, upright=True)


def provided(rule: Rule, raw: torch.Tensor, *numbers: int) -> dict[str, torch.Tensor]:
    """What the rule makes of a tensor, by slot."""
    shape = tuple(raw.shape)
    assert rule.wrong_shape(shape) is None
    found = {}
    for provision in rule.provide(numbers, shape):
        source = Source("raw", shape, provision.ops)
        box = whole(source.slot_shape)
        found[provision.slot] = source.apply(view(raw, source.pull(box)), box)
    return found


def beside(rule: Rule, companion: Companion) -> Rule:
    found = rule.beside(companion)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("rule", "shape", "dim", "sizes"),
    [
        (QKV, (24, 5), 0, (16, 4, 4)),  # the weight, or packed along the input
        (beside(QKV, BLOCKS), (24,), 0, (16, 4, 4)),  # a scale for each row
        (beside(QKV, BLOCKS), (24, 1), 0, (16, 4, 4)),
        (beside(QKV, BLOCKS), (6, 3), 0, (4, 1, 1)),  # a scale for each block of four rows
        (beside(QKV, TURNED), (5, 24), 1, (16, 4, 4)),  # GPTQ: output features are the second dimension
        (beside(QKV, TURNED), (5, 6), 1, (4, 1, 1)),  # AWQ: and several share a word
    ],
)
def test_parts_are_cut_by_their_shares(rule: Rule, shape: tuple[int, ...], dim: int, sizes: tuple[int, ...]) -> None:
    """Whatever an element stands for, parts get what torch's split gives them, in order."""
    raw = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = provided(rule, raw, 7)
    assert [slot.split(".")[2] for slot in found] == ["q", "k", "v"]
    assert all(torch.equal(a, b) for a, b in zip(found.values(), raw.split(sizes, dim), strict=True))


@pytest.mark.parametrize(
    ("rule", "shape"), [(beside(QKV, BLOCKS), ()), (beside(QKV, BLOCKS), (1,)), (beside(QKV, ALIKE), (1,)), (beside(QKV, ALIKE), (5,))]
)
def test_one_number_is_shared(rule: Rule, shape: tuple[int, ...]) -> None:
    """A scale for the whole tensor is every part's, and so is what has no rows."""
    raw = torch.arange(torch.Size(shape).numel()).reshape(shape)
    found = provided(rule, raw, 7)
    assert len(found) == 3 and all(torch.equal(one, raw) for one in found.values())


@pytest.mark.parametrize(
    ("rule", "shape", "word"),
    [
        (QKV, (25, 5), "q, k, v one above another, as 4:1:1$"),
        (QKV, (), "as 4:1:1$"),
        (beside(QKV, BLOCKS), (5, 3), "an element stands for rows of two"),
        (beside(QKV, TURNED), (24,), "an element stands for rows of two"),
        (STACK, (2, 5, 8), "holds 2 experts"),
        (STACK, (3, 5, 7), "form of stacked experts"),
        (STACK, (3, 8), "form of stacked experts"),
    ],
)
def test_what_cannot_be_divided_says_why(rule: Rule, shape: tuple[int, ...], word: str) -> None:
    """A block that straddles two parts, rows that do not divide, dimensions that are not there, another number of experts."""
    wrong = rule.wrong_shape(shape)
    assert wrong is not None
    assert re.search(word, wrong.what)


def test_stacked_experts() -> None:
    """Each expert's parts, the right way up; biases beside transposed weights lie as they are."""
    raw = torch.arange(3 * 5 * 8).reshape(3, 5, 8)
    found = provided(STACK, raw, 4)
    assert list(found)[:3] == ["layers.4.experts.0.gate.weight", "layers.4.experts.0.up.weight", "layers.4.experts.1.gate.weight"]
    assert torch.equal(found["layers.4.experts.2.up.weight"], raw[2, :, 4:].t())
    bias = beside(STACK, UPRIGHT)
    assert bias.raw == "l.{}.gate_up_bias"
    assert provided(bias, torch.arange(24).reshape(3, 8), 4)["layers.4.experts.1.gate.bias"].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(("rule", "shape"), [(QKV, (24, 5)), (beside(QKV, TURNED), (5, 24)), (STACK, (3, 5, 8))])
def test_slots_cover_the_tensor_once(rule: Rule, shape: tuple[int, ...]) -> None:
    """Export puts all of it back."""
    sources = [Source("raw", shape, p.ops) for p in rule.provide((1,), shape)]
    assert tiles(shape, [source.pull(whole(source.slot_shape)) for source in sources])


@pytest.mark.parametrize(
    "rule",
    [
        Rule("l.{}.a_log", "layers.{}.a_log"),  # no weight
        Rule("l.{}.q.weight", "layers.{}.q.weight", (Transpose(),)),  # no quantised weight lies so
        Rule("l.{}.gate_up.weight", "layers.{}.experts.{}.gate.weight", experts=3),  # nor is one spelled so
    ],
)
def test_some_tensors_have_no_companions(rule: Rule) -> None:
    """There a tensor beside is unexpected, whatever it is called."""
    assert rule.beside(BLOCKS) is None


def test_a_mapping_under_a_prefix() -> None:
    """Every raw name gets the body's prefix, and those of heads their own; slots stay."""
    plain = Mapping((Rule("a.weight", "a.weight"), Rule("head.weight", "head.weight")), (Skip("b", "why"),), (Skip("c", "not"),))
    found = plain.under("x.y.", "x.", ("head",))
    assert {rule.raw: rule.slot for rule in found.rules} == {"x.y.a.weight": "a.weight", "x.head.weight": "head.weight"}
    assert [skip.raw for skip in (*found.skips, *found.refused)] == ["x.y.b", "x.y.c"]
