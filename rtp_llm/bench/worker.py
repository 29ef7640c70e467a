"""One load by one contender in one process: ``python -m rtp_llm.bench.worker NAME CKPT``; one JSON line on stdout.

The clock runs from the call of the contender's function until the last byte is on the device.  Python's start, imports and
the device's context are not counted, and reported separately.  The line has ``unavailable`` with the reason, or these fields:

- ``seconds`` of the load, and ``processor_seconds`` of all its threads;
- ``startup_seconds``: until our transport is asked for bytes; ``first_bytes_seconds``: until the first are in place;
- ``import_seconds``, ``device_seconds``, ``bytes``, ``threads``, and what the contender adds;
- ``checksum`` over ``places`` of the ``wanted`` ones;
- ``peak_host_bytes``: the most resident memory, less what was resident before; pages of mapped files count;
- ``pinned_bytes``; ``peak_device_bytes`` by torch's allocator, likewise; ``device_bytes_taken`` by the driver, after the load.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rtp_llm.bench.checksum import checksum
from rtp_llm.bench.contenders import BY_NAME, Contender, Job, Outcome, Unavailable, plan_of
from rtp_llm.bench.recorder import KernelCounters, Recorder, events_json
from rtp_llm.checkpoint import read_catalog, read_config
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.errors import RtpLlmError
from rtp_llm.loader.budget.memory import PeakMeter
from rtp_llm.loader.device import resolve_device
from rtp_llm.models.registry import find_family


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.worker", description=__doc__)
    parser.add_argument("name", choices=sorted(BY_NAME), help="the contender")
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--settings", default="{}", help='JSON {"load": {...}, "parallel": {...}}; the environment\'s unless given')
    parser.add_argument("--sums", type=Path, help="write the checksum of each checkpoint tensor here, as JSON")
    parser.add_argument("--events", type=Path, help="write bytes over time here, as JSON")
    options = parser.parse_args(argv)
    with _quiet_stdout() as answer:
        try:
            line = run_contender(BY_NAME[options.name], options.checkpoint, json.loads(options.settings), options.sums, options.events)
        except Unavailable as reason:
            line = {"name": options.name, "unavailable": str(reason)}
        except RtpLlmError as error:
            print(error, file=sys.stderr)
            return 2
        answer.write(json.dumps(line) + "\n")
    return 0


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[Any]:
    """Yields the real stdout, and sends what libraries print there to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            yield answer
        finally:
            sys.stdout.flush()
            answer.flush()
            os.dup2(answer.fileno(), 1)


def run_contender(
    contender: Contender,
    checkpoint: str,
    settings: Mapping[str, Mapping[str, Any]],
    sums_file: Path | None = None,
    events_file: Path | None = None,
) -> dict[str, Any]:
    """Loads once, and returns the fields of the line.

    Raises:
        Unavailable: the contender cannot do this here.
        RtpLlmError: checkpoint or settings are not right.
    """
    load = LoadConfig(**settings["load"]) if "load" in settings else LoadConfig.from_environment(os.environ)
    parallel = ParallelConfig(**settings["parallel"]) if "parallel" in settings else ParallelConfig.from_environment(os.environ)
    device = resolve_device(load.device, 0)
    catalog = read_catalog(checkpoint)
    catalog.raise_for_problems()
    architecture = read_config(checkpoint)["architectures"]
    import_seconds = _timed(lambda: _import(contender, architecture))
    device_seconds = _timed(lambda: _wake(device))
    recorder = Recorder()
    job = Job(catalog, architecture[0], device, load, parallel, recorder)
    taken = _driver_bytes(device)
    with PeakMeter(torch.device("cpu")) as host, PeakMeter(device) as on_device:
        processor = time.process_time()
        if events_file is None:
            outcome, seconds = _load(contender, job)
        else:
            with KernelCounters(recorder) as counters:
                outcome, seconds = _load(contender, job)
            events_file.write_text(json.dumps(events_json(recorder, counters, seconds)), encoding="utf-8")
        processor_seconds = time.process_time() - processor
    line = {
        "name": contender.name,
        "version": contender.version,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "startup_seconds": recorder.started,
        "first_bytes_seconds": recorder.first,
        "import_seconds": import_seconds,
        "device_seconds": device_seconds,
        "bytes": outcome.nbytes,
        "peak_host_bytes": host.peak_bytes,
        "pinned_bytes": _pinned_bytes() if device.type == "cuda" else None,
        "peak_device_bytes": on_device.peak_bytes if device.type == "cuda" else None,
        "device_bytes_taken": None if taken is None else (_driver_bytes(device) or 0) - taken,
        "threads": outcome.threads,
        **outcome.facts,
    }
    plan = plan_of(job, outcome)
    sums = checksum(plan, outcome.contents(plan))
    if sums_file is not None:
        sums_file.write_text(json.dumps(sums.by_tensor), encoding="utf-8")
    return line | {"checksum": sums.text, "places": sums.places, "wanted": sums.wanted, "bytes_resident": plan.bytes_resident}


def _load(contender: Contender, job: Job) -> tuple[Outcome, float]:
    start = job.recorder.since()
    outcome = contender.load(job)
    if not job.cpu:
        torch.cuda.synchronize(job.device)
    return outcome, job.recorder.since() - start


def _timed(step: Any) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _import(contender: Contender, architectures: Sequence[str]) -> None:
    for module in contender.modules:
        importlib.import_module(module)
    if contender.ours:
        find_family(architectures).load()


def _wake(device: torch.device) -> None:
    """Creates the device's context, which takes a second for every loader."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)


def _driver_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _pinned_bytes() -> int | None:
    """The most bytes that torch's allocator pinned on the host; None if this torch does not tell."""
    stats: Mapping[str, Any] = getattr(torch.cuda, "host_memory_stats", dict)()
    found = stats.get("allocated_bytes.peak")
    return None if found is None else int(found)


if __name__ == "__main__":
    sys.exit(main())
