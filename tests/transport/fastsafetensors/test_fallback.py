"""Everything that can be wrong with the package, on real loads: what is done instead, how loud, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import ForkServer
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama
from tests.transport.fastsafetensors import wheels, workers


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("fallback") / "llama", shard="20KB")


#: Loads begin where torch is imported, and fastsafetensors is not.
_loads = cache(lambda: ForkServer(["rtp_llm.loader"]))


def loaded(directory: Path, *wheel: Path, **settings: Any) -> dict[str, Any]:
    """A load in a process of its own, with a package in front of the path: its report, its log, what was alive."""
    return loaded_all({"": (directory, wheel[0] if wheel else None, settings)})[""]


def loaded_all(cases: Mapping[str, tuple[Path, Path | None, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Loads one after another in one process, which forgets each package before the next."""
    asked = {
        name: [str(directory), None if wheel is None else str(wheel), settings] for name, (directory, wheel, settings) in cases.items()
    }
    ended, out, err = _loads().run(["-m", "tests.transport.fastsafetensors.workers", json.dumps(asked)], 180)
    assert ended.code == 0, err
    assert len(out.splitlines()) == 1, f"something else is on stdout: {out[:1000]}"
    found: dict[str, dict[str, Any]] = json.loads(out)
    return found


def assert_fell_back(found: dict[str, Any], level: str, reason: str, requested: str = "fastsafetensors") -> None:
    report = found["report"]
    assert (report["load_method"], report["effective_mode"], report["requested_mode"]) == ("scratch", "scratch", requested)
    assert reason in report["degraded_reason"]
    assert report["verified"] >= report["tensors"]
    records = [(name, text) for name, text in found["log"] if "falls back to scratch" in text]
    assert [name for name, _ in records] == [level], found["log"]
    for part in (f"requested_mode={requested}", "effective_mode=scratch", f"degraded_reason={report['degraded_reason']}"):
        assert part in records[0][1]


MORE: tuple[tuple[str, ...], ...] = (
    (),
    ("local_copyout_filter",),
    ("stacked_moe_tensors",),
    ("local_copyout_filter", "dim0_split_templates"),
)
ESTIMATES = {
    "10**18": "scratch",
    "5": "fastsafetensors",
    "True": "fastsafetensors",
    "'1'": "fastsafetensors",
    "float('nan')": "fastsafetensors",
}


@pytest.fixture(scope="module")
def simple(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Loads with every package that is plain Python, and without one."""
    folder = tmp_path_factory.mktemp("wheels")
    moe = workers.save_moe(folder / "moe", published=False)
    part = {"ep_size": 2, "ep_rank": 1}
    cases: dict[str, tuple[Path, str, dict[str, Any]]] = {}
    cases |= {f"import {kind}": (llama, source, {}) for kind, source in wheels.IMPORTS.items()}
    cases |= {f"old {what}": (llama, source, {}) for what, source in wheels.TOO_OLD.items()}
    cases |= {f"whole {' '.join(more)}": (moe, wheels.working(more), part) for more in MORE}
    cases |= {f"estimate {value}": (llama, wheels.working(estimate=f"estimated_peak_device_bytes = {value}"), {}) for value in ESTIMATES}
    inline = {"fastsafetensors_config_json": '{"queue_size": 0}'}
    cases["inline"] = (llama, wheels.working(), inline)
    cases["loses"] = (llama, wheels.working(loses="k_proj"), {})
    planted = {name: (d, wheels.planted(folder / str(i), source), s) for i, (name, (d, source, s)) in enumerate(cases.items())}
    return loaded_all(planted | {"absent": (llama, None, {"hide": True}), "auto": (llama, None, {"load_method": "auto"})})


@pytest.mark.parametrize("kind", wheels.IMPORTS)
def test_an_import_that_fails(simple: dict[str, dict[str, Any]], kind: str) -> None:
    """A package that cannot be imported: a WARNING with what the import raised, and right weights."""
    assert_fell_back(simple[f"import {kind}"], "WARNING", kind)


@pytest.mark.parametrize("what", wheels.TOO_OLD)
def test_too_old(simple: dict[str, dict[str, Any]], what: str) -> None:
    """A package that cannot be called: a WARNING that says what is missing."""
    assert_fell_back(simple[f"old {what}"], "WARNING", "AutoLoader")


def test_absent_is_no_warning(simple: dict[str, dict[str, Any]]) -> None:
    """Nobody has to install it: INFO."""
    assert_fell_back(simple["absent"], "INFO", "not installed")


def test_auto_on_the_cpu_is_no_warning(simple: dict[str, dict[str, Any]]) -> None:
    """A precondition of auto that does not hold: INFO."""
    assert_fell_back(simple["auto"], "INFO", "the device is the CPU", "auto")


@pytest.mark.parametrize(
    ("where", "reason"), [("constructor", "TypeError"), ("iteration", "cuFileRead"), ("iteration and close", "the first error")]
)
def test_a_failure_on_the_way(llama: Path, tmp_path: Path, where: str, reason: str) -> None:
    """In the constructor, after some weights, and with a close() that fails as well, which hides nothing: scratch begins
    when nothing of the attempt is left, neither a tensor nor a buffer nor a thread."""
    found = loaded(llama, wheels.planted(tmp_path, wheels.FAILS[where]))
    assert_fell_back(found, "WARNING", reason)
    assert "second error" not in found["report"]["degraded_reason"]
    at_scratch = found["at_scratch"]
    assert (at_scratch["alive"], at_scratch["threads"]) == (0, 0)
    # Where close() itself is broken it frees no reader, but every chunk's buffer went with its iterator.
    assert at_scratch["buffers"] == 0
    if where == "iteration":
        assert at_scratch["seen"] == 2


def test_close_that_fails_after_all_is_in_place(llama: Path, tmp_path: Path) -> None:
    """It is told, and nothing is loaded twice."""
    found = loaded(llama, wheels.planted(tmp_path, wheels.FAILS["close"]))
    report = found["report"]
    assert (report["load_method"], report["degraded_reason"]) == ("fastsafetensors", None) and report["verified"]
    assert [name for name, text in found["log"] if "close failed" in text] == ["WARNING"]


def test_too_little_memory(llama: Path) -> None:
    """A budget that the weights and the smallest chunk overrun: scratch, with a WARNING. (A little more, and chunks become smaller.)"""
    found = loaded(llama, fastsafetensors_config_json='{"device_memory_budget": 211100}')
    assert_fell_back(found, "WARNING", "does not fit")


@pytest.mark.parametrize("more", MORE)
def test_wheels_with_autoloader_alone(simple: dict[str, dict[str, Any]], more: tuple[str, ...]) -> None:
    """A wheel without the parts of AutoLoader: whole tensors are filtered and split here, unless it does that itself."""
    report = simple[f"whole {' '.join(more)}"]["report"]
    assert (report["load_method"], report["tier"], report["slow_path_weights"]) == ("fastsafetensors", "whole", 0)
    assert report["verified"]


def test_settings_that_a_wheel_cannot_be_given(simple: dict[str, dict[str, Any]]) -> None:
    """AutoLoader reads the environment alone: settings that are not there are not silently left out."""
    assert_fell_back(simple["inline"], "WARNING", "cannot be given the settings of FASTSAFETENSORS_CONFIG_JSON")


def test_slow_path_is_counted(simple: dict[str, dict[str, Any]]) -> None:
    """What the wheel does not yield is fetched one by one, counted, and a WARNING."""
    found = simple["loses"]
    report = found["report"]
    assert (report["load_method"], report["slow_path_weights"]) == ("fastsafetensors", 2) and report["verified"]
    assert [text for name, text in found["log"] if name == "WARNING"] == ["slow path: 2 of 21 weights were fetched one by one"]


@pytest.mark.parametrize("estimate", ESTIMATES)
def test_a_wheels_own_estimate(simple: dict[str, dict[str, Any]], estimate: str) -> None:
    """It counts where it is a finite number, and only upwards."""
    assert simple[f"estimate {estimate}"]["report"]["load_method"] == ESTIMATES[estimate]


@pytest.mark.parametrize("where", ["constructor", "iteration"])
def test_one_rank_of_two_fails_and_both_fall_back(llama: Path, tmp_path: Path, where: str) -> None:
    """The package fails on rank 1 alone: both load by scratch, for the same reason, which names the rank."""
    wheel = wheels.planted(tmp_path, wheels.FAILS[where])
    for result in run_ranks(2, workers.rank_load, str(llama), {"broken_on": 1, "wheel": str(wheel)}):
        assert_fell_back(result.value, "WARNING", "rank 1: ") if result.rank == 0 else None
        report = result.value["report"]
        assert (report["load_method"], report["verified"] > 0) == ("scratch", True)
        assert report["degraded_reason"].startswith("rank 1: ")


def test_absent_on_one_rank_of_two(llama: Path) -> None:
    """The least able rank decides for all, before anything is read."""
    for result in run_ranks(2, workers.rank_load, str(llama), {"hidden_on": 1}):
        report = result.value["report"]
        assert (report["load_method"], report["degraded_reason"]) == ("scratch", "rank 1: fastsafetensors is not installed")
        assert [name for name, text in result.value["log"] if "falls back" in text] == (["INFO"] if result.rank == 0 else [])


def test_preflight_fails_on_one_rank_of_two(llama: Path) -> None:
    """One rank without memory for the chunks takes both to scratch."""
    for result in run_ranks(2, workers.rank_load, str(llama), {"budget_on": 1}):
        report = result.value["report"]
        assert report["load_method"] == "scratch" and "does not fit" in report["degraded_reason"] and report["verified"]
