"""What is found in a package is what can be called, whatever its version says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtp_llm.installed import accepts
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier, probe
from tests.support.paths import child_env
from tests.transport.fastsafetensors import wheels

_PROBE = """
import dataclasses, json, sys
from rtp_llm.transport.fastsafetensors.probe import probe
print(json.dumps(dataclasses.asdict(probe())))
"""


def probed(folder: Path | None, before: str = "") -> Capabilities:
    """The capabilities that a fresh interpreter finds with ``folder`` in front of its path."""
    env = child_env()
    if folder is not None:
        env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    done = subprocess.run([sys.executable, "-c", before + _PROBE], env=env, capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    return Capabilities(**found | {"tier": Tier(found["tier"])})


def test_the_installed_wheel_has_the_tier_that_is_expected() -> None:
    """RTP_LLM_EXPECT_FASTSAFETENSORS_TIER states the least; without it, what the pinned wheel has.  It fails, and is never
    skipped, where the wheel is missing or less."""
    expected = Tier[os.environ.get("RTP_LLM_EXPECT_FASTSAFETENSORS_TIER", "bounded").upper()]
    found = probe()
    assert found.tier >= expected, found.reason


def test_tiers_are_in_order() -> None:
    """An expectation is a least one, so tiers compare."""
    assert sorted(Tier) == [Tier.ABSENT, Tier.UNUSABLE, Tier.TOO_OLD, Tier.WHOLE, Tier.BOUNDED]


def test_the_public_wheel_has_no_extension() -> None:
    """``**kwargs`` of ParallelLoader takes every name, and counts for nothing."""
    from fastsafetensors import ParallelLoader

    found = probe()
    assert (found.copyout_filter, found.stacked_split, found.estimate) == (None, None, None)
    assert accepts(ParallelLoader, ("borrowed_tensors",)) and not accepts(ParallelLoader, ("local_copyout_filter",))


def test_absent() -> None:
    """Nothing of that name on the path (where the finder is made blind to it): absent, which is no fault."""
    hide = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "fastsafetensors" else find(name, *rest))
"""
    found = probed(None, hide)
    assert found.tier is Tier.ABSENT and "not installed" in found.reason


@pytest.mark.parametrize("kind", wheels.IMPORTS)
def test_an_import_that_fails_is_unusable(tmp_path: Path, kind: str) -> None:
    """Whatever it raises, it is told apart from a package that is not there, with the error in the reason."""
    found = probed(wheels.planted(tmp_path, wheels.IMPORTS[kind]))
    assert found.tier is Tier.UNUSABLE and kind in found.reason


@pytest.mark.parametrize("what", wheels.TOO_OLD)
def test_too_old(tmp_path: Path, what: str) -> None:
    """Importable, and not callable as it would be called."""
    found = probed(wheels.planted(tmp_path, wheels.TOO_OLD[what]))
    assert found.tier is Tier.TOO_OLD and "AutoLoader" in found.reason


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), (None, None)),
        (("local_copyout_filter",), ("local_copyout_filter", None)),
        (("stacked_moe_tensors",), (None, "stacked_moe_tensors")),
        (("dim0_split_templates",), (None, "dim0_split_templates")),
        (("local_copyout_filter", "dim0_split_templates", "stacked_moe_tensors"), ("local_copyout_filter", "stacked_moe_tensors")),
    ],
)
def test_extensions_are_recognised_one_by_one(tmp_path: Path, more: tuple[str, ...], expected: tuple[str | None, str | None]) -> None:
    """Filter and split are independent of each other, and the newer name of the split is taken."""
    found = probed(wheels.planted(tmp_path, wheels.working(more)))
    assert (found.tier, (found.copyout_filter, found.stacked_split)) == (Tier.WHOLE, expected)
    assert "parallel_loader" in found.reason


def test_an_estimate_is_recognised(tmp_path: Path) -> None:
    """The attribute by which some wheels say how much they will take."""
    source = wheels.working(estimate="def estimated_peak_device_bytes(self): return 1")
    assert probed(wheels.planted(tmp_path, source)).estimate == "estimated_peak_device_bytes"


@pytest.mark.parametrize(
    ("source", "taken"),
    [
        ("lambda device: 0", True),
        ("lambda *, device: 0", True),
        ("lambda **device: 0", False),
        ("lambda *device: 0", False),
        ("lambda device, /: 0", False),
        ("lambda device, /, **kwargs: 0", False),
        ("lambda: 0", False),
        ("5", False),
    ],
)
def test_what_can_be_given_by_keyword(source: str, taken: bool) -> None:
    """Only a parameter of its own that has a usable name."""
    assert accepts(eval(source), ("device",)) is taken
