"""The decision which transport moves a load, row by row."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from rtp_llm.config.load import StackedMode
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier
from rtp_llm.transport.policy import Facts, asked_for, compares, decide, decided

#: A checkpoint of 100 GB on one host's disk, none of it cached, for one GPU.
COLD = Facts(
    all_safetensors=True,
    unindexed=False,
    device_type="cuda",
    ranks=1,
    hosts=1,
    file_system="ext4",
    network=False,
    gpudirect=False,
    bytes_cold=100 * 10**9,
    bytes_warm=0,
    bytes_ranks=100 * 10**9,
)
BOUNDED = Capabilities(Tier.BOUNDED, "all of it")
WHOLE = Capabilities(Tier.WHOLE, "no chunks")
#: Four ranks on a network file system: a third of all tensors is cut by columns, so that each rank fetches them whole.
NETWORK = replace(COLD, network=True, file_system="nfs4", ranks=4, bytes_ranks=200 * 10**9)
PER_EXPERT = StackedMode.PER_EXPERT

FALLS_BACK: list[tuple[str, str, Facts, Capabilities, str | None, int, str]] = [
    ("torch files", "auto", replace(COLD, all_safetensors=False), BOUNDED, None, logging.INFO, "not all files are safetensors"),
    ("torch files, asked", "fastsafetensors", replace(COLD, all_safetensors=False), BOUNDED, None, logging.INFO, "not all files"),
    ("CPU", "auto", replace(COLD, device_type="cpu"), BOUNDED, None, logging.INFO, "the device is the CPU"),
    ("absent", "auto", COLD, Capabilities(Tier.ABSENT, "not installed"), None, logging.INFO, "not installed"),
    ("absent, asked", "fastsafetensors", COLD, Capabilities(Tier.ABSENT, "not installed"), None, logging.INFO, "not installed"),
    ("unusable", "auto", NETWORK, Capabilities(Tier.UNUSABLE, "OSError: libx"), None, logging.WARNING, "OSError: libx"),
    ("unusable, asked", "fastsafetensors", COLD, Capabilities(Tier.UNUSABLE, "OSError: libx"), None, logging.WARNING, "libx"),
    ("too old", "auto", NETWORK, Capabilities(Tier.TOO_OLD, "no AutoLoader"), None, logging.WARNING, "no AutoLoader"),
    ("whole, ranks", "auto", NETWORK, WHOLE, None, logging.WARNING, "whole files to one rank only"),
    ("whole, unindexed", "fastsafetensors", replace(COLD, unindexed=True), WHOLE, None, logging.WARNING, "not unique"),
    ("memory", "auto", replace(COLD, gpudirect=True), BOUNDED, "does not fit", logging.WARNING, "does not fit"),
    ("memory, asked", "fastsafetensors", COLD, BOUNDED, "does not fit", logging.WARNING, "does not fit"),
]


@pytest.mark.parametrize(
    ("asked", "facts", "capabilities", "shortage", "level", "reason"), [r[1:] for r in FALLS_BACK], ids=[r[0] for r in FALLS_BACK]
)
def test_falls_back(asked: str, facts: Facts, capabilities: Capabilities, shortage: str | None, level: int, reason: str) -> None:
    """INFO where the package is absent or a precondition does not hold, WARNING otherwise; the record says all four things."""
    found = decide(asked, PER_EXPERT, facts, capabilities, shortage)
    assert (found.method, found.requested, found.level) == ("scratch", asked, level)
    assert found.degraded_reason is not None and reason in found.degraded_reason
    for part in ("falls back to scratch", f"requested_mode={asked}", "effective_mode=scratch", f"degraded_reason={found.degraded_reason}"):
        assert part in found.text


@pytest.mark.parametrize(
    ("asked", "facts", "capabilities", "method"),
    [
        pytest.param("fastsafetensors", COLD, BOUNDED, "fastsafetensors", id="asked for"),
        pytest.param("fastsafetensors", replace(COLD, device_type="cpu"), BOUNDED, "fastsafetensors", id="asked for on the CPU"),
        pytest.param("fastsafetensors", COLD, WHOLE, "fastsafetensors", id="asked for, whole tensors, one rank"),
        pytest.param("fastsafetensors", replace(COLD, unindexed=True), BOUNDED, "fastsafetensors", id="unindexed are not read in chunks"),
        pytest.param("auto", COLD, BOUNDED, "scratch", id="local disk"),
        pytest.param("auto", replace(COLD, bytes_cold=0, bytes_warm=10**11), BOUNDED, "scratch", id="page cache"),
        pytest.param("auto", replace(COLD, ranks=4, bytes_ranks=2 * 10**11), BOUNDED, "scratch", id="local disk, four ranks"),
        pytest.param("auto", replace(NETWORK, ranks=1, bytes_ranks=10**11), BOUNDED, "scratch", id="network, one rank"),
        pytest.param("auto", NETWORK, BOUNDED, "fastsafetensors", id="network, four ranks"),
        # Broadcasts take a 75th of the time of storage, so that passing on is not worth it below that much read twice.
        pytest.param("auto", replace(NETWORK, bytes_ranks=101 * 10**9), BOUNDED, "scratch", id="network, hardly anything read twice"),
        pytest.param("auto", replace(NETWORK, bytes_ranks=102 * 10**9), BOUNDED, "fastsafetensors", id="network, a little read twice"),
        pytest.param("auto", replace(NETWORK, hosts=2), BOUNDED, "fastsafetensors", id="network, four ranks of two hosts"),
        pytest.param("auto", replace(NETWORK, bytes_cold=0, bytes_warm=10**11), BOUNDED, "scratch", id="network, all of it cached"),
        pytest.param("auto", replace(COLD, gpudirect=True), BOUNDED, "fastsafetensors", id="GPUDirect or 3FS"),
    ],
)
def test_chooses(asked: str, facts: Facts, capabilities: Capabilities, method: str) -> None:
    """A choice that is no fall-back is one INFO record with its reasons, and no degraded reason."""
    found = decide(asked, PER_EXPERT, facts, capabilities)
    assert (found.method, found.level, found.degraded_reason) == (method, logging.INFO, None)
    assert found.reasons and all(reason in found.text for reason in found.reasons)
    assert "falls back" not in found.text


def test_the_estimate_is_told() -> None:
    """auto's reason has the storage, what is cached, the ranks, and both estimates."""
    (reason,) = decide("auto", PER_EXPERT, replace(COLD, bytes_warm=10**11, ranks=2), BOUNDED).reasons
    assert "local storage (ext4), 50% in the page cache, 2 rank(s) on 1 host(s)" in reason and reason.count(" s") >= 2


def test_scratch_is_never_overruled() -> None:
    """Who asks for the own reader gets it: nothing is looked at."""
    found = asked_for(PER_EXPERT)
    assert (found.method, found.requested, found.level, found.degraded_reason) == ("scratch", "scratch", logging.INFO, None)


@pytest.mark.parametrize("asked", ["auto", "fastsafetensors"])
@pytest.mark.parametrize(
    "facts", [COLD, NETWORK, replace(COLD, device_type="cpu"), replace(COLD, gpudirect=True), replace(COLD, all_safetensors=False)]
)
def test_an_early_decision_is_the_decision(asked: str, facts: Facts) -> None:
    """What is decided before the package is imported is what would be decided with any package; and a decision that no
    package changes is made early."""
    able = [Capabilities(tier, tier.name) for tier in Tier if tier is not Tier.ABSENT]
    every = [decide(asked, PER_EXPERT, facts, capabilities) for capabilities in able]
    early = decided(asked, PER_EXPERT, facts)
    assert early is None or every == [early] * len(able)
    assert (early is None) == (len({(d.method, d.reasons) for d in every}) > 1)


def test_one_rank_asks_nothing_of_the_page_cache() -> None:
    """The sizes that nobody has looked for are 0, and change nothing."""
    assert not compares("auto", 1) and not compares("fastsafetensors", 4) and compares("auto", 4)
    unseen = replace(COLD, bytes_cold=0, bytes_warm=0, bytes_ranks=0)
    assert decide("auto", PER_EXPERT, unseen, BOUNDED) == decide("auto", PER_EXPERT, COLD, BOUNDED)


@pytest.mark.parametrize("mode", list(StackedMode))
def test_the_mode_is_kept(mode: StackedMode) -> None:
    """The policy does not change how stacked tensors are delivered."""
    assert decide("fastsafetensors", mode, COLD, BOUNDED).stacked_moe_mode is mode


def test_an_empty_checkpoint_divides_by_nothing() -> None:
    """No bytes, no estimate that fails."""
    assert decide("auto", PER_EXPERT, replace(COLD, bytes_cold=0, bytes_ranks=0), BOUNDED).method == "scratch"


@pytest.mark.parametrize(
    ("extras", "split", "kept"), [((None, None), "here", "here, after delivery"), (("f", "s"), "by the wheel", "by the wheel")]
)
def test_ways_of_a_wheel_without_chunks(extras: tuple[str | None, str | None], split: str, kept: str) -> None:
    """Filter and split are two independent extensions, and the reasons say who does what."""
    found = decide("fastsafetensors", PER_EXPERT, COLD, replace(WHOLE, copyout_filter=extras[0], stacked_split=extras[1]))
    assert f"experts are split {split}, and tensors filtered {kept}" in found.reasons[-1]
