"""The wheels that Bazel built for one platform, against the table and the platform's real lock.

Bazel runs this file once a platform, with both of its wheels: RTP_PLATFORM, RTP_WHEEL, RTP_WHEEL_INDEX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from arch_config.table import ROOT, Platform, base_requirements, load_table
from bazel.wheel.check_wheel import Wheel, check, project_version, requirements
from deps.locks import parse_lock

pytestmark = pytest.mark.bazel


@pytest.fixture(scope="module")
def platform() -> Platform:
    return load_table().platforms[os.environ["RTP_PLATFORM"]]


@pytest.fixture(params=["RTP_WHEEL", "RTP_WHEEL_INDEX"])
def wheel(request: pytest.FixtureRequest) -> Path:
    return Path(os.environ[request.param])


def test_wheel_is_right_for_its_platform(platform: Platform, wheel: Path, request: pytest.FixtureRequest) -> None:
    """Name, tags, METADATA, Requires-Dist, RECORD, contents and shared libraries, all problems at once."""
    lock = parse_lock((ROOT / "deps" / f"requirements_lock_{platform.name}.txt").read_text())
    urls = "index" not in wheel.parts
    assert check(wheel, platform, lock, base_requirements(), project_version(), urls) == []


def test_torch_is_pinned_to_the_platform_s_build(platform: Platform, wheel: Path) -> None:
    """A URL with its sha256 where no public index serves the file, else the exact version; never a range."""
    (torch,) = [r for r in requirements(Wheel(wheel)) if r.name == "torch"]
    if platform.torch.url and "index" not in wheel.parts:
        assert torch.url == f"{platform.torch.url}#sha256={platform.torch.sha256}"
    else:
        assert torch == Requirement(f"torch=={platform.torch.version}")


def test_wheel_for_an_index_has_no_url(wheel: Path) -> None:
    """//:wheel_index is for indexes that refuse URL requirements."""
    if "index" in wheel.parts:
        assert [r for r in requirements(Wheel(wheel)) if r.url] == []


def pip_takes(wheel: Path, platform: Platform, **other: str) -> tuple[bool, str]:
    """Whether pip's resolver takes the wheel for a Python and CPU; offline, and without the wheel's requirements."""
    python, cpu = other.get("python", platform.python), other.get("cpu", platform.cpu)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", "--only-binary=:all:", "--target=unused"]
    command += ["--implementation=cp", f"--python-version={python}", f"--platform={other.get('tag', f'manylinux_2_28_{cpu}')}"]
    done = subprocess.run([*command, str(wheel.resolve())], capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def test_pip_takes_the_wheel_where_it_belongs(platform: Platform, wheel: Path) -> None:
    """pip, asked for the platform's Python and CPU, would install it."""
    taken, said = pip_takes(wheel, platform)
    assert taken, said
    assert "Would install rtp-llm" in said.replace("rtp_llm", "rtp-llm")


@pytest.mark.parametrize(
    "other", [{"cpu": "x86_64"}, {"cpu": "aarch64"}, {"python": "3.9"}, {"python": "3.13"}, {"tag": "macosx_14_0_arm64"}]
)
def test_pip_refuses_the_wheel_elsewhere(platform: Platform, wheel: Path, other: dict[str, str]) -> None:
    """Another CPU, Python or system: pip says that the wheel is not for that platform."""
    taken, said = pip_takes(wheel, platform, **other)
    if other == {"cpu": platform.cpu}:
        assert taken, said
    else:
        assert not taken
        assert "is not a supported wheel on this platform" in said
