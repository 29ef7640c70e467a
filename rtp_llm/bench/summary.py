"""The results as one document: medians, ranges, ratios to the limits, and problems."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rtp_llm.bench.cache import WARM_ENOUGH, Eviction
from rtp_llm.bench.checksum import differing
from rtp_llm.bench.contenders import Contender
from rtp_llm.bench.faults import BenchFault
from rtp_llm.bench.request import COLD, WARM, BenchRequest
from rtp_llm.errors import Problem
from rtp_llm.transport.pagecache import file_system

#: Tensors named where values differ.
_NAMED = 5


@dataclass(slots=True)
class Entry:
    """One contender while it is measured."""

    contender: Contender
    absent: str | None
    runs: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    sums: dict[str, int] = field(default_factory=dict)

    @property
    def out(self) -> bool:
        """Whether it is no longer measured: it is absent, or failed once."""
        return self.absent is not None or bool(self.failures)


def document(
    request: BenchRequest,
    entries: list[Entry],
    limits: dict[str, list[dict[str, Any]]],
    states: tuple[str, ...],
    cold: Eviction | None,
    busy: float,
) -> dict[str, Any]:
    """The document of ``rtp-llm bench --json``, whose fields ``docs/json.md`` lists.

    ``limits`` has a list of measurements for each name; ``busy`` is the load average before the first run.
    """
    measured = {name: _limit(found) for name, found in limits.items()}
    reached = {state: reachable(measured, state, request.device_type) for state in states}
    reference = next((e for e in entries if e.sums and not e.contender.ours), next((e for e in entries if e.sums), None))
    problems = [p for e in entries for p in _problems(e, reference)]
    where = file_system(Path(request.catalog.directory))
    every = [r for e in entries for found in e.runs.values() for r in found]
    return {
        "checkpoint": request.catalog.directory,
        "bytes": request.catalog.total_bytes,
        "tensors": len(request.catalog.tensors),
        "files": len(request.catalog.files),
        "device": request.device,
        "tp_size": request.parallel.tp_size,
        "tp_rank": request.parallel.tp_rank,
        "ep_size": request.parallel.ep_size,
        "ep_rank": request.parallel.ep_rank,
        "runs": request.runs,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(every) | {"file_system": where.kind if where else None, "load_average": busy},
        "cache": {
            "states": list(states),
            "cold": None if cold is None else {"possible": COLD in states, "how": cold.how, "reason": cold.reason},
        },
        "limits": measured,
        "reachable": reached,
        "contenders": [_row(e, reached, reference) for e in entries],
        "problems": [p.to_json() for p in problems],
    }


def machine(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The machine, for the table's head."""
    cpu = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    device = next((r["device_name"] for r in runs), "unknown")
    return {
        "cpu": cpu[0] if cpu else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "device_name": device,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _limit(found: list[dict[str, Any]]) -> dict[str, Any]:
    speeds = sorted(limit["gb_per_s"] for limit in found)
    return {
        "what": found[0]["what"],
        "gb_per_s": statistics.median(speeds),
        "range": [speeds[0], speeds[-1]],
        "runs": [limit["gb_per_s"] for limit in found],
        "threads": found[0]["threads"],
        "reason": found[0]["reason"],
    }


#: The limits of a load, by state of the cache and kind of device; the smallest is what a load can reach.
_BOUNDS = {
    (WARM, "cuda"): ("pinned_copy", "cached_read"),
    (WARM, "cpu"): ("fresh_read",),
    (COLD, "cuda"): ("direct_read",),
    (COLD, "cpu"): ("direct_read",),
}


def reachable(limits: Mapping[str, Mapping[str, Any]], state: str, device_type: str) -> dict[str, Any] | None:
    """The limit of a load, ``{"name", "gb_per_s", "runs"}``; None if it was not measured."""
    names = [name for name in _BOUNDS[state, device_type] if name in limits and limits[name]["gb_per_s"] > 0]
    if len(names) < len(_BOUNDS[state, device_type]):
        return None
    name = min(names, key=lambda n: limits[n]["gb_per_s"])
    return {"name": name, "gb_per_s": limits[name]["gb_per_s"], "runs": limits[name]["runs"]}


def _row(entry: Entry, reached: Mapping[str, dict[str, Any] | None], reference: Entry | None) -> dict[str, Any]:
    contender = entry.contender
    runs = [r for found in entry.runs.values() for r in found]
    return {
        "name": contender.name,
        "what": contender.what,
        "version": contender.version,
        "ours": contender.ours,
        "status": "failed" if entry.failures else "absent" if entry.absent else "measured",
        "reason": entry.failures[0] if entry.failures else entry.absent,
        "checksum": runs[0]["checksum"] if runs else None,
        "places": runs[0]["places"] if runs else None,
        "wanted": runs[0]["wanted"] if runs else None,
        "compared_with": reference.contender.name if reference is not None and runs else None,
        "results": {state: _result(found, reached[state]) for state, found in entry.runs.items()},
    }


def _result(found: list[dict[str, Any]], limit: dict[str, Any] | None) -> dict[str, Any]:
    seconds = sorted(r["seconds"] for r in found)
    median = statistics.median(seconds)
    speed = found[0]["bytes"] / 1e9 / median
    return {
        "seconds": median,
        "range": [seconds[0], seconds[-1]],
        "gb_per_s": speed,
        "ratio": None if limit is None else _ratio(found, limit["runs"]),
        **{name: _most(found, name) for name in ("peak_host_bytes", "pinned_bytes", "peak_device_bytes", "device_bytes_taken")},
        **{name: _median(found, name) for name in ("startup_seconds", "first_bytes_seconds", "import_seconds", "device_seconds")},
        "bytes": found[0]["bytes"],
        "bytes_resident": found[0]["bytes_resident"],
        "threads": found[0]["threads"],
        "runs": found,
    }


def _ratio(found: list[dict[str, Any]], limits: list[float]) -> float | None:
    """The median over turns of speed divided by the limit of the same turn, since other work on the machine slows both."""
    if len(found) != len(limits) or not all(limits):
        return None
    ratios: list[float] = [r["bytes"] / 1e9 / r["seconds"] / limit for r, limit in zip(found, limits, strict=True)]
    return statistics.median(ratios)


def _most(found: list[dict[str, Any]], name: str) -> int | None:
    return max((r[name] for r in found if r[name] is not None), default=None)


def _median(found: list[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in found if r[name] is not None]
    return statistics.median(values) if values else None


def _problems(entry: Entry, reference: Entry | None) -> list[Problem]:
    name = entry.contender.name
    problems = [
        Problem(BenchFault.RUN_FAILED, f"{name} failed", actual=reason, fix="see what it says alone: " + _by_hand(name))
        for reason in entry.failures
    ]
    sums = {r["checksum"] for found in entry.runs.values() for r in found}
    if len(sums) > 1:
        problems.append(
            Problem(
                BenchFault.VALUES_DIFFER,
                f"{name} loads other values in other runs",
                expected="one checksum",
                actual=", ".join(sorted(sums)),
            )
        )
    if reference is not None and reference is not entry:
        names = list(differing(entry.sums, reference.sums))
        problems += [
            Problem(
                BenchFault.VALUES_DIFFER,
                f"{name} does not load what {reference.contender.name} loads ({len(names)} tensors)",
                tensor=tensor,
                expected=f"{reference.sums[tensor]:016x}",
                actual=f"{entry.sums[tensor]:016x}",
            )
            for tensor in names[:_NAMED]
        ]
    for state, found in entry.runs.items():
        least = min((r["cached"] for r in found if r["cached"] is not None), default=None)
        if state == WARM and least is not None and least < WARM_ENOUGH:
            problems.append(
                Problem(
                    BenchFault.NOT_WARM,
                    f"{name} was measured on files that are not all cached",
                    expected="all",
                    actual=f"{least:.0%}",
                    fix="a checkpoint that fits into free memory",
                )
            )
    return problems


def _by_hand(name: str) -> str:
    return f"python -m rtp_llm.bench.worker {name} CKPT"
