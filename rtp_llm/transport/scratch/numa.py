"""CPUs that are near a GPU: those of the NUMA node of its PCI slot.

On a host of several nodes, a copy from another node's memory crosses the link between the processors.  Memory lies on the node
that touches it first, so a thread on near CPUs also has near buffers.  (Formats: sysfs-bus-pci, sysfs-devices-node, cpuset(7).)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_SYSFS = Path("/sys")


def near_cpus(device: torch.device, sysfs: Path = _SYSFS) -> frozenset[int] | None:
    """The CPUs near ``device``, a CUDA device, that this thread may use.

    None where there is no choice: a single node, one that the system does not name (most virtual machines), or no CPU of it allowed.
    """
    slot = _slot(device)
    node = -1 if slot is None else _number(sysfs / "bus/pci/devices" / slot / "numa_node")
    if node < 0:
        return None
    allowed = os.sched_getaffinity(0)
    near = allowed & _cpu_list(sysfs / f"devices/system/node/node{node}/cpulist")
    return frozenset(near) if near and near != allowed else None


def _slot(device: torch.device) -> str | None:
    """``0000:1b:00.0``; None where torch does not say it (before 2.8, and other builds than CUDA's)."""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def _number(path: Path) -> int:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return -1


def _cpu_list(path: Path) -> set[int]:
    """``0-3,8,10-11`` as a set; nothing where it cannot be read."""
    try:
        spans = [span.partition("-") for span in path.read_text(encoding="ascii").strip().split(",") if span]
        return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        return set()
