"""Runs contenders in turn, A B C A B C, each in a fresh process, and collects the results in one document."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rtp_llm.bench.cache import Eviction, evict, resident, warm
from rtp_llm.bench.contenders import BY_NAME, SCRUBBED, Contender
from rtp_llm.bench.faults import BenchError, BenchFault
from rtp_llm.bench.request import COLD, WARM, BenchRequest
from rtp_llm.bench.summary import Entry, document
from rtp_llm.errors import Problem

#: A run that is slower than this many bytes a second hangs; the slowest network storage in use is faster.
_SLOWEST = 5e6
#: Seconds that a run may take besides reading: Python, imports of CUDA libraries from a cold disk, checksums.
_BESIDE = 600.0
#: A launcher's variables, which are removed: a worker is a single process.
_LAUNCH = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
#: Characters of the last line of a failed worker's stderr that are its reason.
_REASON = 300


def run_bench(
    request: BenchRequest, tell: Callable[[str], None] = lambda line: None, more: Callable[[], bool] = lambda: True
) -> dict[str, Any]:
    """Measures, and returns the document that ``rtp-llm bench --json`` prints.

    ``tell`` gets a line after every run; ``more``, called before every turn but the first, says whether there is time for it.
    ``problems`` in the document lists contenders that failed and values that differ.

    Raises:
        BenchError: only cold runs were asked for, and the page cache cannot be emptied.
    """
    entries = [Entry(c, c.absent(request.device_type, _formats(request))) for c in (BY_NAME[name] for name in request.contenders)]
    states, cold = _possible(request)
    limits: dict[str, list[dict[str, Any]]] = {}
    busy = os.getloadavg()[0]  # before our own work counts
    with tempfile.TemporaryDirectory(prefix="rtp-llm-bench-") as scratch:
        for turn in range(request.runs):
            if turn and not more():
                break
            for state in states:
                label = f"run {turn + 1} of {request.runs}, {state}"
                if request.limits:
                    prepare_cache(request, state)
                    for limit in _limits(request, state):
                        limits.setdefault(limit["name"], []).append(limit)
                # Each turn begins with another contender, so that none always follows the same one.
                first = turn % max(1, len(entries))
                for entry in (*entries[first:], *entries[:first]):
                    if not entry.out:
                        tell(f"{label}, {entry.contender.name}: {_one(request, state, entry, Path(scratch))}")
    return document(request, entries, limits, states, cold, busy)


def _formats(request: BenchRequest) -> frozenset[str]:
    return frozenset(f.format for f in request.catalog.files)


def _possible(request: BenchRequest) -> tuple[tuple[str, ...], Eviction | None]:
    if COLD not in request.states:
        return request.states, None
    eviction = evict(request.files, drop_caches=request.drop_caches)
    if eviction.reason is None:
        return request.states, eviction
    if WARM not in request.states:
        raise BenchError(
            Problem(
                BenchFault.NOT_COLD,
                f"the files cannot be taken out of the page cache: {eviction.reason}",
                expected="nothing of them in the page cache",
                actual=f"{eviction.left} bytes after {eviction.how}",
                fix="run as root with --drop_caches, or measure with --cache warm",
            )
        )
    return (WARM,), eviction


def prepare_cache(request: BenchRequest, state: str) -> float | None:
    """Brings the page cache into ``state``; returns the cached part of the files, None if the kernel does not tell."""
    if state == WARM:
        warm(request.files)
    else:
        evict(request.files, drop_caches=request.drop_caches)
    found = resident(request.files)
    return None if found is None else found / max(1, sum(f.stat().st_size for f in request.files))


def _one(request: BenchRequest, state: str, entry: Entry, scratch: Path) -> str:
    """Runs a contender once and adds the result to ``entry``; returns a summary."""
    cached = prepare_cache(request, state)
    sums = scratch / f"{entry.contender.name}.json"
    done = spawn(request, entry.contender, ["--sums", str(sums)])
    if isinstance(done, str):
        entry.failures.append(done)
        return f"failed: {done}"
    if "unavailable" in done:
        entry.absent = done["unavailable"]
        return f"not available: {done['unavailable']}"
    if not entry.sums:
        entry.sums = json.loads(sums.read_text(encoding="utf-8"))
    entry.runs.setdefault(state, []).append(done | {"cached": cached})
    return f"{done['seconds']:.3f} s, {done['bytes'] / 1e9 / done['seconds']:.2f} GB/s"


def record(request: BenchRequest, name: str, state: str) -> dict[str, Any]:
    """Bytes over time of one more run of one contender, beside the measured ones; see :func:`events_json`.

    Raises:
        BenchError: the run failed.
    """
    prepare_cache(request, state)
    with tempfile.TemporaryDirectory(prefix="rtp-llm-bench-") as scratch:
        events = Path(scratch, "events.json")
        done = spawn(request, BY_NAME[name], ["--events", str(events)])
        if isinstance(done, str) or "unavailable" in done:
            reason = done if isinstance(done, str) else done["unavailable"]
            raise BenchError(Problem(BenchFault.RUN_FAILED, f"{name} failed", expected="a run to draw", actual=reason))
        found: dict[str, Any] = json.loads(events.read_text(encoding="utf-8"))
        return found


def spawn(request: BenchRequest, contender: Contender, extra: Sequence[str] = ()) -> dict[str, Any] | str:
    """Runs a contender once, in a new process: its line of JSON, or why there is none."""
    settings = {
        "load": dataclasses.asdict(request.load) | {"device": request.device},
        "parallel": dataclasses.asdict(request.parallel),
    }
    command = ["-m", "rtp_llm.bench.worker", contender.name, request.catalog.directory, "--settings", json.dumps(settings), *extra]
    line: dict[str, Any] | str = _python(command, request.catalog.total_bytes, environment(contender))
    return line


def environment(contender: Contender) -> dict[str, str]:
    """A worker's environment: this process's without other loaders' settings and launchers' ranks, and the contender's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SCRUBBED) and name not in _LAUNCH}
    # The same packages as here, and no access to the model hub.
    path = os.pathsep.join(filter(None, sys.path))
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", **dict(contender.environ)}


def _limits(request: BenchRequest, state: str) -> list[dict[str, Any]]:
    command = ["-m", "rtp_llm.bench.limits", state, request.catalog.directory, "--device", request.device]
    found = _python(command, request.catalog.total_bytes, environment(BY_NAME["rtp-llm"]))
    if isinstance(found, str):
        return [{"name": f"{state}_limits", "what": "limits", "gb_per_s": 0.0, "threads": 0, "reason": found}]
    return list(found)


def _python(command: Sequence[str], nbytes: int, environ: Mapping[str, str]) -> Any:
    """The JSON that a Python process prints, or the reason why it prints none."""
    timeout = _BESIDE + nbytes / _SLOWEST
    try:
        done = subprocess.run(
            [sys.executable, *command], env=dict(environ), capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:.0f} s"
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    last = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    return f"{how}: {last[0][:_REASON]}" if last else how
