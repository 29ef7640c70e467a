"""How much memory there is, in a container and outside of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm.loader.budget.memory import free_bytes

CPU = torch.device("cpu")
MIB = 2**20


def group(folder: Path, **files: object) -> Path:
    """A control group's folder, as cgroup v2 shows it."""
    for name, content in files.items():
        (folder / f"memory.{name}").write_text(f"{content}\n")
    return folder


@pytest.mark.parametrize(
    ("limit", "used", "stat", "free"),
    [
        pytest.param(100, 30, "", 70, id="nothing is said of the page cache"),
        pytest.param(100, 90, f"anon {30 * MIB}\nfile {60 * MIB}\nfile_mapped 5", 70, id="the page cache is given back"),
        pytest.param(100, 130, f"file {10 * MIB}", 0, id="over the limit"),
    ],
)
def test_a_containers_limit(tmp_path: Path, limit: int, used: int, stat: str, free: int) -> None:
    """What the limit leaves, to which the page cache does not count: it is given back to whoever allocates (cgroup-v2.rst, memory.stat)."""
    assert free_bytes(CPU, group(tmp_path, max=limit * MIB, current=used * MIB, stat=stat)) == free * MIB


@pytest.mark.parametrize("limit", ["max", 2**60])
def test_no_limit_that_counts(tmp_path: Path, limit: object) -> None:
    """Without a limit, or with one beyond the machine's memory, the machine's memory counts."""
    assert MIB < free_bytes(CPU, group(tmp_path, max=limit, current=MIB, stat="file 0")) < 2**50


def test_no_control_group(tmp_path: Path) -> None:
    """Neither cgroup v1 nor the root group has these files."""
    assert MIB < free_bytes(CPU, tmp_path) < 2**50
    assert MIB < free_bytes(CPU, group(tmp_path, max=MIB)) < 2**50
