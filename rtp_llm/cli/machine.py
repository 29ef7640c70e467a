"""CPUs and memory of the machine; ``rtp_llm.transport.pagecache`` knows about files."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path


def cpu_count() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> dict[str, int | None]:
    """Bytes of memory: ``total`` and ``available`` of the machine, ``limit`` of the control group (None: no limit)."""
    text = _read("/proc/meminfo")
    found = {name: re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE) for name in ("MemTotal", "MemAvailable")}
    total, available = (int(match.group(1)) * 1024 if match else None for match in found.values())
    return {"total": total, "available": available, "limit": _group_limit(total)}


def compiler() -> dict[str, str | None]:
    """Paths of the tools that compile kernels: ``ninja``, and ``nvcc`` where flashinfer looks for it; None if absent."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin" / "nvcc" if home else Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    return {"ninja": shutil.which("ninja"), "nvcc": str(nvcc) if nvcc.exists() else None}


def _group_limit(total: int | None) -> int | None:
    """The control group's limit (cgroup v2, then v1, which says "no limit" by a number beyond the machine's memory)."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = _read(path).strip()
        if text.isdigit() and (total is None or int(text) < total):
            return int(text)
    return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or hidden in this container
        return ""
