"""Which experts a rank holds: pure arithmetic, and the tables that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm import ParallelConfig, build_plan
from rtp_llm.errors import PlanError, RtpLlmError
from rtp_llm.loader.prepare.eplb import read_table
from rtp_llm.parallel.experts import ExpertLayers, Ownership, Replica, check_ownership, contiguous, replicas
from tests.moe.variants import make
from tests.support.tiny import save_tiny_llama


@given(st.integers(1, 200), st.integers(1, 64))
def test_a_contiguous_split_is_even_and_complete(count: int, ranks: int) -> None:
    """Every expert is on one rank, in order; ranks differ by one at most, and the low ones hold more."""
    held = contiguous(count, ranks)
    assert [e for experts in held for e in experts] == list(range(count))
    sizes = [len(experts) for experts in held]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1 and len(sizes) == ranks


def test_physical_experts_are_split_in_order() -> None:
    """Six physical experts on two ranks: places count within a rank, copies are listed by rank and place."""
    held = Ownership(2, {3: (0, 2, 2, 1, 0, 3)}).held(3, 4)
    assert held == ((0, 2, 2), (1, 0, 3))
    assert replicas(held, 4) == (
        (Replica(0, 0), Replica(1, 1)),
        (Replica(1, 0),),
        (Replica(0, 1), Replica(0, 2)),
        (Replica(1, 2),),
    )


@pytest.mark.parametrize(
    ("ownership", "experts", "faults"),
    [
        (Ownership(2), None, ["NO_EXPERTS"]),
        (Ownership(1, {0: (0,)}), None, ["NO_EXPERTS"]),
        (Ownership(5), ExpertLayers(4, (0,)), ["TOO_MANY_EXPERT_RANKS"]),
        (Ownership(2, {0: (0, 1, 2, 3)}), ExpertLayers(4, (0, 1)), ["BAD_EXPERT_TABLE"]),
        (Ownership(2, {0: (0, 1), 7: (0, 1)}), ExpertLayers(2, (0,)), ["BAD_EXPERT_TABLE"]),
        (Ownership(2, {0: (0, 1, 2, 4, 5)}), ExpertLayers(4, (0,)), ["BAD_EXPERT_TABLE"] * 3),
    ],
)
def test_what_cannot_be_is_refused(ownership: Ownership, experts: ExpertLayers | None, faults: list[str]) -> None:
    """No experts, more ranks than experts, a row too few or too many; and, all at once, experts that do not exist, a number
    that does not divide, and an expert that no rank would hold."""
    with pytest.raises(PlanError) as caught:
        check_ownership(ownership, experts)
    assert [problem.code for problem in caught.value.problems] == faults


def test_an_expert_on_no_rank_is_named() -> None:
    """The union over ranks must be complete: the message says which expert is not there."""
    with pytest.raises(PlanError, match=r"layer 4: logical experts that no rank would hold: expected each at least once, found never 2"):
        check_ownership(Ownership(2, {4: (0, 1, 0, 3)}), ExpertLayers(4, (4,)))


def test_a_table_for_all_layers_or_for_each(tmp_path: Path) -> None:
    """One row stands for every layer with experts; several are theirs in order."""
    experts = ExpertLayers(2, (1, 3))
    file = tmp_path / "eplb.json"
    file.write_text('{"phy2log": [0, 1, 1]}')
    assert read_table(str(file), experts) == {1: (0, 1, 1), 3: (0, 1, 1)}
    file.write_text('{"phy2log": [[0, 1], [1, 0]]}')
    assert read_table(str(file), experts) == {1: (0, 1), 3: (1, 0)}


@pytest.mark.parametrize(
    "content",
    [
        {"phy2log": []},
        {"phy2log": [[0, 1]]},
        {"phy2log": [[0, 1], []]},
        {"phy2log": [[0, 1], [0, True]]},
        {"phy2log": [[0, 1], [0, 1.0]]},
        {"phy2log": "0 1"},
        {"phy2log": None},
        {"log2phy": [0, 1]},
        [0, 1],
        "{",
        None,
    ],
)
def test_files_that_hold_no_table(content: Any, tmp_path: Path) -> None:
    """Each is one message with the file's name: no table, a row too few, an empty row, no numbers, not JSON, not there."""
    file = tmp_path / "eplb.json"
    if content is not None:
        file.write_text(content if content == "{" else json.dumps(content))
    with pytest.raises(RtpLlmError) as caught:
        read_table(str(file), ExpertLayers(2, (1, 3)))
    (problem,) = caught.value.problems
    assert problem.file == "eplb.json"


def test_a_plan_refuses_what_cannot_be(tmp_path: Path) -> None:
    """More ranks than experts, a dense model with expert ranks or a table, and a table that leaves out an expert."""
    make("qwen3_moe", tmp_path / "moe")
    dense = save_tiny_llama(tmp_path / "dense")
    (tmp_path / "eplb.json").write_text('{"phy2log": [0, 1, 2, 3, 4, 5, 5, 4]}')
    table = str(tmp_path / "eplb.json")
    with pytest.raises(PlanError, match="TOO_MANY_EXPERT_RANKS.*expected ep_size from 1 to 7, found 8"):
        build_plan(tmp_path / "moe", ParallelConfig(ep_size=8))
    with pytest.raises(PlanError, match="NO_EXPERTS.*use tp_size"):
        build_plan(dense, ParallelConfig(ep_size=2))
    with pytest.raises(PlanError, match="NO_EXPERTS"):
        build_plan(dense, ParallelConfig(eplb=table))
    with pytest.raises(PlanError, match="never 6"):
        build_plan(tmp_path / "moe", ParallelConfig(ep_size=2, eplb=table))
