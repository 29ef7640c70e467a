"""Loads with several ranks at once, which may share a device.

``python -m rtp_llm.bench.ranks CKPT --settings JSON`` is one rank, started with a launcher's variables; it prints one JSON line.
As in :mod:`rtp_llm.bench.worker`, the clock leaves out Python, imports and the device's context; also the ranks' first
exchange, after which all begin together.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import IO, Any

import torch

from rtp_llm.bench.contenders import BY_NAME
from rtp_llm.bench.faults import BenchError, BenchFault
from rtp_llm.bench.measure import environment
from rtp_llm.checkpoint import read_config
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.errors import Problem
from rtp_llm.loader import load_model
from rtp_llm.loader.device import resolve_device
from rtp_llm.models.registry import find_family
from rtp_llm.parallel.world import join_world

#: Seconds for one launch: imports of several processes on few cores, and 16 GB at a tenth of the usual speed.
_TIMEOUT_S = 240.0


def launch(directory: str, places: Sequence[ParallelConfig], load: LoadConfig) -> list[dict[str, Any]]:
    """The report of each rank of one launch on this host, in the order of ``places``.

    Raises:
        BenchError: as :func:`run_commands`.
    """
    settings = [json.dumps({"load": dataclasses.asdict(load), "parallel": dataclasses.asdict(place)}) for place in places]
    commands = [["-m", "rtp_llm.bench.ranks", directory, "--settings", one] for one in settings]
    found: list[dict[str, Any]] = run_commands(commands, environment(BY_NAME["rtp-llm"]))
    return found


def run_commands(commands: Sequence[Sequence[str]], environ: Mapping[str, str], timeout_s: float = _TIMEOUT_S) -> list[Any]:
    """Runs ``python *command`` for all commands at once, as the ranks of one launch on this host.

    A single command runs without a launcher's variables.  Returns the JSON in the last line of each stdout, in rank order.

    Raises:
        BenchError: a rank that fails, or does not end within ``timeout_s`` seconds.
    """
    size = len(commands)
    with socket.socket() as probe, ExitStack() as stack:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        # Files, not pipes: a rank with much output would wait for this process, and the others for it.
        outputs = [[stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)] for _ in commands]
        started = [
            subprocess.Popen([sys.executable, *command], env={**environ, **_place(rank, size, port)}, stdout=out, stderr=errors)
            for rank, (command, (out, errors)) in enumerate(zip(commands, outputs, strict=True))
        ]
        deadline = time.monotonic() + timeout_s
        try:
            for process in started:
                process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise _failed(f"no answer within {timeout_s:g} s") from error
        finally:
            for process in started:
                process.kill()
                process.wait()
        texts = [[_text(file) for file in files] for files in outputs]
    wrong = [
        f"rank {rank}: {(errors or [f'exit code {process.returncode}'])[-1]}"
        for rank, (process, (_, errors)) in enumerate(zip(started, texts, strict=True))
        if process.returncode
    ]
    if wrong:
        raise _failed("; ".join(wrong))
    return [json.loads(out[-1]) for out, _ in texts]


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives a rank."""
    if size == 1:
        return {}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}


def _text(file: IO[str]) -> list[str]:
    file.seek(0)
    return file.read().strip().splitlines()


def _failed(reason: str) -> BenchError:
    return BenchError(Problem(BenchFault.RUN_FAILED, "ranks that load together failed", expected="a run of each", actual=reason))


def load_rank(directory: str, settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One rank's load; the clock starts after imports and the first exchange."""
    load, parallel = LoadConfig(**settings["load"]), ParallelConfig(**settings["parallel"])
    find_family(read_config(directory)["architectures"]).load()
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
        "extra_bytes": None if peak is None else peak - report.budget.resident,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.ranks", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--settings", required=True, help='JSON {"load": {...}, "parallel": {...}}')
    options = parser.parse_args(argv)
    print(json.dumps(load_rank(options.checkpoint, json.loads(options.settings))))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
