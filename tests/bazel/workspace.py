"""The real working tree, also when Bazel runs a test in a tree of links to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from arch_config.table import ROOT

#: Bazel's runfiles link to the tree's own files; a test that reads all BUILD files reads them there.
WORKSPACE = (ROOT / "WORKSPACE").resolve().parent


def test_folders() -> list[str]:
    """Every folder under tests/ that has a test file, as a path from the root."""
    return sorted({path.parent.relative_to(WORKSPACE).as_posix() for path in (WORKSPACE / "tests").rglob("test_*.py")})


def copy_workspace(destination: Path) -> Path:
    """The tree without what is built, installed or fetched."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".cache", ".*_cache", "__pycache__", "bazel-*", "build", "dist", "demo-checkpoints", "*.egg-info"
    )
    shutil.copytree(WORKSPACE, destination, ignore=left_out, symlinks=True)
    return destination
