"""Row-parallel matrices against column-parallel ones: ``python -m rtp_llm.bench.shards CKPT --tp 2 --device cuda``.

All tensor-parallel ranks read at once, a process each, on the device of their number or on the only one.  They read the parts
of one kind at a time, in turns, by the scratch transport.  On the CPU memory is fresh, as in a load.  To a GPU the parts are
read until the checkpoint's bytes are reached, so that start-up does not count.  A rank's part of a column-parallel matrix is
contiguous in the file; of a row-parallel one it is a part of each row.

One JSON line: by kind the bytes that all ranks keep, the bytes that they read, and for each turn the bytes kept a second, until
the slowest rank is done.  Files should be in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rtp_llm.bench.contenders import BY_NAME
from rtp_llm.bench.measure import environment
from rtp_llm.bench.ranks import run_commands
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.loader.budget.transport import scratch
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.fill.placement import Placement, allocate
from rtp_llm.loader.prepare import prepare
from rtp_llm.parallel.world import join_world
from rtp_llm.plan.plan import Delivery
from rtp_llm.transport.interface import NoProgress, TransferStats
from rtp_llm.transport.scratch.blocks import extent_of

KINDS = ("column", "row")


class _Sink(Placement):
    """A sink without derived tensors, so no thread waits in it."""

    def stop(self) -> None: ...


def split_kind(part: Delivery) -> str | None:
    """``row`` or ``column``; None for a tensor that every rank reads whole."""
    if part.nbytes == part.tensor.nbytes:
        return None
    return "row" if extent_of(part).runs.steps else "column"


def compare_shards(checkpoint: str, tp_size: int, device: str, turns: int) -> dict[str, dict[str, Any]]:
    """What :mod:`rtp_llm.bench.shards` prints.

    Raises:
        BenchError: a rank that fails.
    """
    command = ["-m", "rtp_llm.bench.shards", checkpoint, "--tp", str(tp_size), "--device", device, "--turns", str(turns), "--rank"]
    ranks = run_commands([[*command, str(rank)] for rank in range(tp_size)], environment(BY_NAME["rtp-llm"]))
    found = {}
    for kind in KINDS:
        nbytes = sum(rank[kind]["bytes"] for rank in ranks)
        slowest = [max(seconds) for seconds in zip(*(rank[kind]["seconds"] for rank in ranks), strict=True)]
        read = sum(rank[kind]["bytes_read"] for rank in ranks)
        found[kind] = {"bytes": nbytes, "bytes_read": read, "bytes_per_s": [nbytes / seconds for seconds in slowest]}
    return found


def one_rank(checkpoint: str, parallel: ParallelConfig, device: torch.device, turns: int) -> dict[str, dict[str, Any]]:
    """A rank's ``bytes``, ``bytes_read`` and ``seconds`` of each turn, by kind; a first turn only warms up."""
    load = LoadConfig.from_environment(os.environ)
    context = planning_context(checkpoint, parallel, load, device)
    prepared = prepare(context)
    of_kind = {}
    for kind in KINDS:
        parts = tuple(part for part in prepared.plan.deliveries if split_kind(part) == kind)
        times = -(-prepared.catalog.total_bytes // max(1, sum(part.nbytes for part in parts)))
        of_kind[kind] = replace(prepared.plan, deliveries=parts * (1 if device.type == "cpu" else times))
    found: dict[str, dict[str, Any]] = {kind: {"seconds": []} for kind in KINDS}
    world = join_world(os.environ, device.type, load.timeout_s)
    with world.watch() as watch:
        for turn in range(turns + 1):
            for kind, plan in of_kind.items():
                sink = _Sink(allocate(prepared.model, prepared.plan, device))
                watch.exchange(b"ready")
                start = time.perf_counter()
                moved: TransferStats = scratch(context, prepared).deliver(plan, sink, NoProgress(), watch.check)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds = time.perf_counter() - start
                found[kind] |= {"bytes": moved.bytes_placed, "bytes_read": moved.bytes_read}
                if turn:
                    found[kind]["seconds"].append(seconds)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.shards", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tp < 2:
        parser.error("--tp: of one rank nothing is divided")
    if options.rank is None:
        print(json.dumps(compare_shards(options.checkpoint, options.tp, options.device, options.turns)))
        return 0
    device = resolve_device(options.device, options.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    place = ParallelConfig(tp_size=options.tp, tp_rank=options.rank)
    print(json.dumps(one_rank(options.checkpoint, place, device, options.turns)))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
