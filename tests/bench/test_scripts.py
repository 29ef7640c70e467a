"""The scripts of ``benchmark/`` run as their pages say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT, child_env


def test_the_planning_benchmark_finds_its_helper(tmp_path: Path) -> None:
    """``python benchmark/plan.py`` needs no variable of the environment: the tests' writer of sparse checkpoints is not installed."""
    script = f"import pathlib, runpy; runpy.run_path({str(ROOT / 'benchmark' / 'plan.py')!r})['make']('llama_3_70b', pathlib.Path('made'))"
    # Everything but the working tree, from another folder: what a shell has.
    path = os.pathsep.join(
        entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry).absolute() != ROOT
    )
    env = child_env({"PYTHONPATH": path})
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "made").glob("*.safetensors"))) == 30
