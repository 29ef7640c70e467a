"""A load that does not fit is found out before anything is allocated, of all ranks of a device together."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rtp_llm import LoadConfig
from rtp_llm.loader.budget.facts import combine_facts
from rtp_llm.loader.budget.preflight import shortages
from rtp_llm.loader.context import planning_context
from rtp_llm.parallel.world import join_world
from rtp_llm.transport.policy import Facts
from tests.support.plans import budget_of
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama


def short(folder: str, shares: list[float]) -> list[str]:
    """What all ranks together find to be too little, where each may take its share of one rank's peak."""
    world = join_world(os.environ, "cpu", 60.0)
    load = LoadConfig(device="cpu")
    budget = budget_of(folder, load)
    with world.watch() as watch:
        context = replace(planning_context(folder, settings=load), watch=watch)
        return [str(p) for p in shortages(context, budget, int(budget.peak * shares[world.rank]))]


@pytest.mark.parametrize(("shares", "fits"), [([2.0, 2.0], True), ([1.5, 1.5], False), ([2.5, 1.9], False)])
def test_ranks_that_share_a_device_are_added_up(tmp_path: Path, shares: list[float], fits: bool) -> None:
    """Each alone would see the memory of both as its own; the one that sees least of it counts; both are told the same."""
    folder = save_tiny_llama(tmp_path)
    first, second = (result.value for result in run_ranks(2, short, str(folder), shares))
    assert first == second and (first == []) is fits
    peak = 2 * budget_of(folder, LoadConfig(device="cpu")).peak
    assert fits or f"expected {peak} bytes for 2 rank(s)" in first[0]


#: One rank's: half of 1000 bytes is cached.
FACTS = Facts(
    all_safetensors=True,
    unindexed=False,
    device_type="cuda",
    ranks=2,
    hosts=1,
    file_system="ext4",
    network=False,
    gpudirect=True,
    bytes_cold=500,
    bytes_warm=500,
    bytes_ranks=700,
)


def joined(changes: list[dict[str, object]], lacks: list[str]) -> tuple[str, Facts]:
    """What is known when each rank has told what it knows."""
    world = join_world(os.environ, "cpu", 60.0)
    with world.watch() as watch:
        return combine_facts(lacks[world.rank], replace(FACTS, **changes[world.rank]), watch)  # type: ignore[arg-type]


@pytest.mark.parametrize("cold", [0, 1])
def test_the_coldest_host_counts(cold: int) -> None:
    """All wait for the host that has to fetch most from storage, whichever rank is on it; what ranks read is added up, and what
    one of them cannot do none does."""
    changes: list[dict[str, object]] = [{"bytes_cold": 0, "bytes_warm": 1000}, {"bytes_cold": 0, "bytes_warm": 1000}]
    changes[cold] = {"bytes_cold": 900, "bytes_warm": 100, "gpudirect": False, "network": True}
    first, second = (result.value for result in run_ranks(2, joined, changes, ["", "it is not there"]))
    assert first == second
    lack, facts = first
    assert lack == "rank 1: it is not there"
    assert (facts.bytes_cold, facts.bytes_warm, facts.bytes_ranks, facts.hosts) == (900, 100, 1400, 1)
    assert (facts.gpudirect, facts.network) == (False, True)
