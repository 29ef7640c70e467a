"""The routing math against a plain reference in float64, on random scores, on ties and at extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_llm.layers.router import RENORMALISE_EPSILON, Routing, route, unroutable


def plain_scores(logits: list[float], routing: Routing) -> list[float]:
    """The scores by their definition."""
    if routing.scoring == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in logits]
    powers = [math.exp(x - max(logits)) for x in logits]
    return [p / sum(powers) for p in powers]


def plain(scores: list[float], routing: Routing, bias: list[float] | None) -> dict[int, float]:
    """The chosen experts of one token and their weights: definitions only, with Python's floats."""
    choice = [s + b for s, b in zip(scores, bias, strict=True)] if bias is not None else scores
    each = len(scores) // routing.groups
    groups = [choice[g * each : (g + 1) * each] for g in range(routing.groups)]
    worth = [sum(sorted(group)[-2:]) if routing.best_two else max(group) for group in groups]
    best = sorted(range(routing.groups), key=lambda g: (-worth[g], g))[: routing.top_groups]
    eligible = [e for e in range(len(scores)) if e // each in best]
    chosen = sorted(eligible, key=lambda e: (-choice[e], e))[: routing.top_k]
    total = sum(scores[e] for e in chosen) + routing.epsilon if routing.renormalise else 1.0
    return {e: scores[e] / total * routing.scale for e in chosen}


#: As each reference has it: Mixtral, Qwen2-MoE, DeepSeek-V2 in both ways, DeepSeek-V3 with groups and (Kimi-K2) without.
ROUTINGS = {
    "mixtral": Routing(8, 2, renormalise=True),
    "qwen2_moe": Routing(8, 3),
    "all of them": Routing(8, 8, renormalise=True),
    "deepseek_v2 greedy": Routing(8, 3, scale=16.0, wide=True),
    "deepseek_v2 groups": Routing(8, 3, groups=4, top_groups=2, scale=16.0, wide=True),
    "deepseek_v3": Routing(
        8,
        3,
        scoring="sigmoid",
        groups=4,
        top_groups=2,
        best_two=True,
        corrected=True,
        renormalise=True,
        epsilon=RENORMALISE_EPSILON,
        scale=2.5,
        wide=True,
    ),
    "kimi_k2": Routing(
        8, 2, scoring="sigmoid", best_two=True, corrected=True, renormalise=True, epsilon=RENORMALISE_EPSILON, scale=2.827, wide=True
    ),
}

#: A few values, so that ties abound; and some at which softmax and sigmoid vanish or saturate.
LEVELS = st.sampled_from([-1.0, 0.0, 0.0, 0.5, 1.0])
EXTREMES = st.sampled_from([-1e4, -200.0, -50.0, 0.0, 50.0, 200.0, 1e4])
SMOOTH = st.floats(-8, 8)


@pytest.mark.parametrize("name", ROUTINGS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_choice_and_weights_are_those_of_the_definition(name: str, data: st.DataObject) -> None:
    """In float64 the experts are the same, ties going to the lower number, and so are the weights."""
    routing = ROUTINGS[name]
    values = data.draw(st.sampled_from([LEVELS, EXTREMES, SMOOTH]))
    logits = data.draw(st.lists(values, min_size=8, max_size=8))
    bias = data.draw(st.lists(st.integers(-8, 8).map(lambda n: n / 8), min_size=8, max_size=8)) if routing.corrected else None
    given_logits = torch.tensor([logits], dtype=torch.float64)
    weights, chosen = route(given_logits, routing, None if bias is None else torch.tensor(bias, dtype=torch.float64))
    # The choice is held against torch's own scores: another exp may differ in the last bit, and make or break a tie.
    scores = (given_logits.sigmoid() if routing.scoring == "sigmoid" else given_logits.softmax(-1))[0].tolist()
    assert scores == pytest.approx(plain_scores(logits, routing), rel=1e-12, abs=1e-300)
    wanted = plain(scores, routing, bias)
    found = dict(zip(chosen[0].tolist(), weights[0].tolist(), strict=True))
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("name", ROUTINGS)
def test_nothing_is_lost_in_float32(name: str) -> None:
    """Scores far apart in all directions give finite weights; where all vanish, an epsilon keeps them from being NaN."""
    routing = ROUTINGS[name]
    logits = torch.tensor([[-1e4] * 8, [1e4] * 8, [0.0] * 8, [1e4, -1e4] * 4])
    weights, chosen = route(logits, routing, torch.zeros(8) if routing.corrected else None)
    assert weights.dtype == torch.float32 and weights.isfinite().all()
    assert all(len(set(row)) == routing.top_k for row in chosen.tolist())
    assert chosen[2].tolist() == list(range(routing.top_k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lower_number(dtype: torch.dtype) -> None:
    """A thousand tokens with coarse scores: every chosen expert beats, or ties with and precedes, every other one."""
    logits = torch.randint(0, 3, (1000, 64), generator=torch.Generator().manual_seed(0)).to(dtype)
    _, chosen = route(logits, Routing(64, 6))
    order = (logits.float() * 64 - torch.arange(64)).topk(6).indices
    assert torch.equal(chosen, order)


def test_a_bias_moves_the_choice_and_not_the_weight() -> None:
    """An expert lifted by its bias is chosen with the weight of its own score."""
    routing = replace(ROUTINGS["kimi_k2"], renormalise=False, epsilon=0.0, scale=1.0, top_k=1)
    bias = torch.zeros(8)
    bias[5] = 10
    weights, chosen = route(torch.tensor([[3.0, 0, 0, 0, 0, -1.0, 0, 0]]), routing, bias)
    assert chosen.tolist() == [[5]]
    assert weights.item() == pytest.approx(1 / (1 + math.e))


@pytest.mark.parametrize(
    ("shape", "argument", "words"),
    [
        ((8, 9, 1, 1, False), "top_k", "at most the 8 experts"),
        ((8, 2, 3, 1, False), "groups", "divisor"),
        ((8, 2, 16, 1, False), "groups", "divisor"),
        ((8, 2, 4, 5, False), "top_groups", "at most the number of groups (4)"),
        ((8, 5, 4, 2, False), "top_k", "the 4 experts of 2 group(s)"),
        ((8, 2, 8, 2, True), "groups", "best two"),
    ],
)
def test_shapes_that_no_routing_can_do(shape: tuple[int, int, int, int, bool], argument: str, words: str) -> None:
    """Each is told with the argument at fault and what is expected of it, and no such routing can be made."""
    experts, top_k, groups, top_groups, best_two = shape
    ((found, expected, _),) = unroutable(*shape)
    assert found == argument and words in expected
    with pytest.raises(AssertionError):
        Routing(experts, top_k, groups=groups, top_groups=top_groups, best_two=best_two)
