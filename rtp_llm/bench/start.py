"""The steps of a load before its first byte, in a fresh process: ``python -m rtp_llm.bench.start CKPT --device cuda:0``.

One JSON line with seconds: of ``plan``; of ``team``, the reader threads with their buffers, here not in parallel with the plan;
and of ``allocate``, the parameters.  Imports and the device's context are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

import torch

from rtp_llm.checkpoint import read_config
from rtp_llm.config import LoadConfig
from rtp_llm.loader.budget import reader_pool
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.fill.placement import allocate
from rtp_llm.loader.prepare import prepare
from rtp_llm.models.registry import find_family
from rtp_llm.transport.interface import TransferStats


def time_steps(checkpoint: str, device: torch.device, load: LoadConfig) -> dict[str, float]:
    """Seconds of each step; reads headers only."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
    find_family(read_config(checkpoint)["architectures"]).load()
    found: dict[str, float] = {}
    start = time.perf_counter()
    context = planning_context(checkpoint, None, load, device)
    prepared = prepare(context)
    found["plan"] = time.perf_counter() - start
    start = time.perf_counter()
    with reader_pool(context) as team:
        if team is not None:
            team.work(lambda staging: TransferStats(0, 0, 0, 0))
    found["team"] = time.perf_counter() - start
    start = time.perf_counter()
    allocate(prepared.model, prepared.plan, device)
    found["allocate"] = time.perf_counter() - start
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtp_llm.bench.start", description=__doc__)
    parser.add_argument("checkpoint", help="a checkpoint directory")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:N")
    options = parser.parse_args(argv)
    load = LoadConfig.from_environment(os.environ)
    print(json.dumps(time_steps(options.checkpoint, resolve_device(options.device, 0), load)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
