"""CPUs near a GPU, as the kernel tells in sysfs: a tree that looks like it stands for hosts that cannot be had here."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rtp_llm.transport.scratch.numa import near_cpus

DEVICE = torch.device("cuda", 1)


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes of which the second one has the GPU at 0001:1b:00.0; this thread may use CPUs 2 to 9."""
    for node, cpus in enumerate(("0-3,8\n", "4-7,9-11\n")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    slot = tmp_path / "bus/pci/devices/0001:1b:00.0"
    slot.mkdir(parents=True)
    (slot / "numa_node").write_text("1\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2, 10)))
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties if device == DEVICE else None)
    return tmp_path


def test_cpus_of_the_node(sysfs: Path) -> None:
    """Those of its node, and of these only what this thread may use."""
    assert near_cpus(DEVICE, sysfs) == {4, 5, 6, 7, 9}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("bus/pci/devices/0001:1b:00.0/numa_node", "-1\n"),  # a virtual machine, or a host of one node
        ("bus/pci/devices/0001:1b:00.0/numa_node", ""),
        ("bus/pci/devices/0001:1b:00.0/numa_node", None),
        ("devices/system/node/node1/cpulist", None),
        ("devices/system/node/node1/cpulist", "?\n"),
        ("devices/system/node/node1/cpulist", "\n"),  # a node of memory alone
        ("devices/system/node/node1/cpulist", "0-1,10-99\n"),  # none that may be used
        ("devices/system/node/node1/cpulist", "0-99\n"),  # all of them
    ],
)
def test_nothing_to_choose(sysfs: Path, file: str, content: str | None) -> None:
    """Threads then run where they may."""
    if content is None:
        (sysfs / file).unlink()
    else:
        (sysfs / file).write_text(content)
    assert near_cpus(DEVICE, sysfs) is None


def test_a_torch_that_does_not_name_the_slot(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no error."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(name="GPU"))
    assert near_cpus(DEVICE, sysfs) is None
