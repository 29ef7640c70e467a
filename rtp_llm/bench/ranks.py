"""One load by several ranks at once, which may share a device: ``python -m rtp_llm.bench.ranks CKPT --settings JSON`` is one of
them, started with a launcher's variables; it prints one JSON line.

As for one process (:mod:`rtp_llm.bench.worker`) Python, imports and the device's context are outside of the clock, and so is the
first meeting of the ranks; all begin together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rtp_llm.bench.contenders import BY_NAME
from rtp_llm.bench.faults import BenchError, BenchFault
from rtp_llm.bench.measure import environment
from rtp_llm.checkpoint import read_config
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.errors import Problem
from rtp_llm.loader import load_model
from rtp_llm.loader.device import resolve_device
from rtp_llm.models.registry import resolve
from rtp_llm.parallel.world import join_world

#: Longest time of one launch: imports of several processes on few cores, and 16 GB at a tenth of the usual speed.
_TIMEOUT_S = 240


def launch(directory: str, places: Sequence[ParallelConfig], load: LoadConfig) -> list[dict[str, Any]]:
    """What each rank of one launch on this host says of its load, in the order of ``places``.

    Raises:
        BenchError: a rank that fails, or does not come to an end.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    size = len(places)
    common = environment(BY_NAME["rtp-llm"]) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = []
    for rank, place in enumerate(places):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        settings = json.dumps({"load": dataclasses.asdict(load), "parallel": dataclasses.asdict(place)})
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "rtp_llm.bench.ranks", directory, "--settings", settings],
                env=common | {name: str(number) for name, number in numbers.items()},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=_TIMEOUT_S) for process in started]
    except subprocess.TimeoutExpired as error:
        raise _failed(f"no answer within {_TIMEOUT_S} s") from error
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(started, outputs, strict=True):
        if process.returncode:
            raise _failed((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


def _failed(reason: str) -> BenchError:
    return BenchError(Problem(BenchFault.RUN_FAILED, "ranks that load together failed", expected="a run of each", actual=reason))


def run(directory: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One rank's load, with everything that is not loading done before."""
    load, parallel = LoadConfig(**settings["load"]), ParallelConfig(**settings["parallel"])
    resolve(read_config(directory)["architectures"]).load()
    device = resolve_device(load.device, int(os.environ["LOCAL_RANK"]))
    world = join_world(os.environ, device.type, load.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    with world.watch() as watch:
        watch.exchange(b"ready")
    start = time.perf_counter()
    report = load_model(directory, str(device), parallel, load, world=world).report
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = report.measured_peak_bytes
    return {
        "seconds": seconds,
        "phases": dict(report.phases),
        "bytes_placed": report.bytes_placed,
        "bytes_read": report.bytes_read,
        "extra_bytes": None if peak is None else peak - report.plan.bytes_resident,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.ranks", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--settings", required=True, help='JSON {"load": {...}, "parallel": {...}}')
    options = parser.parse_args(argv)
    print(json.dumps(run(options.checkpoint, json.loads(options.settings))))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
