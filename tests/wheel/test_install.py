"""The built wheel, installed by pip into a fresh environment, works: the console script runs from what was packed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from arch_config.table import ROOT
from bazel.wheel.check_wheel import project_version

pytestmark = pytest.mark.bazel


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel in it; pip sees no index, so the wheel is all that can be installed."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, with_pip=False, symlinks=True)
    command = [sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run([*command, str(Path(os.environ["RTP_WHEEL_INDEX"]).resolve())], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return home


def run(environment: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A console script of the environment, with the locked requirements on its path and the working tree off it."""
    packages = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path.endswith("/site")]
    # The other entries are trees in which the project's sources may lie.
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(packages), "HF_HUB_OFFLINE": "1", "HOME": str(environment)}
    command = [str(environment / "bin" / arguments[0]), *arguments[1:]]
    return subprocess.run(command, cwd=environment, env=env, capture_output=True, text=True, check=False)


def test_doctor_runs_from_the_wheel(environment: Path) -> None:
    """rtp-llm doctor --json: exit code 0, and the version is the platform's."""
    done = run(environment, "rtp-llm", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


def test_package_is_the_installed_one(environment: Path) -> None:
    """The package that the script imports lies in the environment, with the wheel's version and py.typed."""
    code = (
        "import importlib.metadata as m, pathlib, rtp_llm\n"
        "p = pathlib.Path(rtp_llm.__file__)\n"
        "print(p, m.version('rtp-llm'), p.with_name('py.typed').exists())\n"
    )
    done = run(environment, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    path, version, typed = done.stdout.split()
    assert Path(path).is_relative_to(environment)
    assert version == f"{project_version(ROOT)}+cpu"
    assert typed == "True"


def test_installed_package_meets_its_requirements(environment: Path) -> None:
    """Every Requires-Dist of the wheel is met by the locked packages: names, versions, local labels."""
    code = (
        "import importlib.metadata as m\n"
        "from packaging.requirements import Requirement\n"
        "for line in m.requires('rtp-llm'):\n"
        "    r = Requirement(line)\n"
        "    assert r.specifier.contains(m.version(r.name), prereleases=True), (line, m.version(r.name))\n"
    )
    done = run(environment, "python", "-c", code)
    assert done.returncode == 0, done.stderr
