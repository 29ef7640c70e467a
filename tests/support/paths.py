"""Where the working tree is, and what a child process of a test needs to find it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]


def child_env(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a Python child: the working tree first on its path, one torch thread, no hub, stacks on a
    crash; then ``extra``."""
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT) if not path else f"{ROOT}{os.pathsep}{path}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
        **(extra or {}),
    }
