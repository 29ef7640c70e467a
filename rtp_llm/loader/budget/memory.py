"""Free memory, and the peak memory of a step."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
#: Resets the kernel's high-water mark of resident memory (proc(5), ``clear_refs``).
_RESET_PEAK = "5"
#: Where a container sees its own control group (cgroup v2).
_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device, control_group: Path = _CONTROL_GROUP) -> int:
    """Bytes that can still be allocated on ``device``: the driver's free memory, or the kernel's estimate of available
    memory, and no more than the control group allows."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    available = _kibibytes(Path("/proc/meminfo").read_text(), "MemAvailable")
    return min(available, _control_group_free(control_group, available))


def _kibibytes(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _control_group_free(root: Path, otherwise: int) -> int:
    """Bytes that cgroup v2's limit leaves, reclaimable page cache included; ``otherwise`` without a limit."""
    try:
        limit, used = (root / "memory.max").read_text().strip(), int((root / "memory.current").read_text())
        cache = re.search(r"^file (\d+)$", (root / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # not a cgroup v2 system, or the root group, which has no limit
        return otherwise
    if limit == "max":
        return otherwise
    return max(0, int(limit) - used + (int(cache.group(1)) if cache else 0))


class PeakMeter:
    """The peak of the enclosed step in bytes, above the level before it: allocated by torch on a CUDA device, resident memory
    without page cache on the CPU.  ``peak_bytes`` is None where the kernel does not report it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.peak_bytes: int | None = None

    def __enter__(self) -> PeakMeter:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        elif self._resettable():
            self._before = _kibibytes(_STATUS.read_text(), "VmRSS")
        else:
            self._before = -1
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        elif self._before >= 0:
            self.peak_bytes = max(0, _kibibytes(_STATUS.read_text(), "VmHWM") - self._before)

    @staticmethod
    def _resettable() -> bool:
        try:
            _CLEAR_REFS.write_text(_RESET_PEAK)
        except OSError:  # a kernel or container that does not allow it
            return False
        return True
