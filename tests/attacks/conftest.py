"""A place for hostile directories that is cleared at once: some hold a hundred megabytes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A path that does not exist yet, removed after the test."""
    yield tmp_path / "checkpoint"
    shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
