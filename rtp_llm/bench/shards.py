"""Row-parallel matrices against column-parallel ones: ``python -m rtp_llm.bench.shards CKPT --tp 2 --device cuda:0``.

The own reader brings the last tensor-parallel rank's part of each kind alone, in turns: on the CPU into fresh memory, as in a load; to a
GPU as often as it takes to move the bytes of the whole checkpoint, so that locking buffers and starting threads do not count.  Of a
column-parallel matrix a rank's part lies in one piece in the file; of a row-parallel one it is a part of each row.  One JSON line: by
kind the bytes that are kept, those read, and for each turn the bytes kept a second.  Files are to be in the page cache.
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

from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.loader.choose import scratch
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.draft import draft
from rtp_llm.loader.placement import Placement, allocate
from rtp_llm.parallel.groups import groups_at
from rtp_llm.plan.plan import Delivery
from rtp_llm.transport.interface import Quiet
from rtp_llm.transport.scratch.blocks import extent_of


class _Sink(Placement):
    """Nothing is made of what comes here, so nobody ever waits in it."""

    def stop(self) -> None: ...


def kind_of(part: Delivery) -> str | None:
    """``row`` or ``column``; None for a tensor that every rank reads whole."""
    if part.nbytes == part.tensor.nbytes:
        return None
    return "row" if extent_of(part).runs.steps else "column"


def run(checkpoint: str, device: torch.device, load: LoadConfig, tp_size: int, turns: int) -> dict[str, dict[str, Any]]:
    """What :mod:`rtp_llm.bench.shards` prints."""
    parallel = ParallelConfig(tp_size=tp_size, tp_rank=tp_size - 1)
    drafted = draft(checkpoint, parallel, load, groups_at(parallel), device.type)
    of_kind = {}
    for kind in ("column", "row"):
        parts = tuple(part for part in drafted.plan.deliveries if kind_of(part) == kind)
        times = -(-drafted.catalog.total_bytes // max(1, sum(part.nbytes for part in parts)))
        of_kind[kind] = replace(drafted.plan, deliveries=parts * (1 if device.type == "cpu" else times))
    found: dict[str, dict[str, Any]] = {kind: {"bytes": 0, "bytes_read": 0, "bytes_per_s": []} for kind in of_kind}
    for _ in range(turns + 1):  # the first turn warms up
        for kind, plan in of_kind.items():
            sink = _Sink(allocate(drafted.model, drafted.plan, device))
            start = time.perf_counter()
            moved = scratch(drafted, device, load).deliver(plan, sink, Quiet(), lambda: None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rate = moved.bytes_placed / (time.perf_counter() - start)
            found[kind] |= {"bytes": moved.bytes_placed, "bytes_read": moved.bytes_read}
            found[kind]["bytes_per_s"].append(rate)
    for one in found.values():
        del one["bytes_per_s"][0]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.shards", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args(argv)
    load = LoadConfig.from_environment(os.environ)
    print(json.dumps(run(options.checkpoint, resolve_device(options.device, 0), load, options.tp, options.turns)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
