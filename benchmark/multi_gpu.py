"""Several ranks, a GPU each: rank-local reads against files read once and broadcast; experts one by one against whole stacks.

python benchmark/multi_gpu.py                          two checkpoints of 16 GB, two ranks, three runs a row
python benchmark/multi_gpu.py --ranks 4 --runs 5
python benchmark/multi_gpu.py --quick --device cpu     sizes for a laptop, over gloo

One launch a row; its ranks load the checkpoint --runs times, from the page cache, and drop it again.  Seconds are those of the
phase in which bytes move, of the slowest rank, by the median of the runs; read is what all ranks together took from the files;
extra is the peak on a device beyond the weights, of the rank that needs most, and what the plan predicted for it.  Prints the table of
``benchmark/multi_gpu.md``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_llm.bench.cache import warm
from rtp_llm.bench.faults import BenchError
from rtp_llm.bench.ranks import run_commands
from rtp_llm.bench.synthetic import SyntheticCheckpoint, llama, qwen3_moe, write_checkpoint

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.\d+\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class Row:
    """A way of loading one of the checkpoints; ``split`` is ``tp`` or ``ep``: what all ranks together divide."""

    checkpoint: str
    split: str
    method: str
    stacked_moe_mode: str = "per-expert"

    @property
    def name(self) -> str:
        return f"{self.method}, {self.stacked_moe_mode}" if self.checkpoint == "stacks" and self.method != "scratch" else self.method


ROWS = (
    Row("llama", "tp", "scratch"),
    Row("llama", "tp", "fastsafetensors"),
    *(Row("experts", split, method) for split in ("tp", "ep") for method in ("scratch", "fastsafetensors")),
    *(
        Row("stacks", split, method, mode)
        for split in ("tp", "ep")
        for method, mode in (("scratch", "per-expert"), ("fastsafetensors", "per-expert"), ("fastsafetensors", "full-stacked"))
    ),
)


def stacked(made: SyntheticCheckpoint) -> SyntheticCheckpoint:
    """The same model with the experts of a layer in two tensors: ``gate_up_proj [E, 2I, H]`` and ``down_proj [E, H, I]``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in made.shapes.items():
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            shapes[name] = shape
        elif expert[2] == "gate":
            shapes[f"{expert[1]}.gate_up_proj"] = (made.config["num_experts"], 2 * shape[0], shape[1])
        elif expert[2] == "down":
            shapes[f"{expert[1]}.down_proj"] = (made.config["num_experts"], *shape)
    return SyntheticCheckpoint(made.config, shapes)


def checkpoints(gb: float) -> dict[str, SyntheticCheckpoint]:
    experts = qwen3_moe(gb)
    return {"llama": llama(gb), "experts": experts, "stacks": stacked(experts)}


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.worker is not None:
        return _worker(json.loads(options.worker))
    gb, runs = (0.1, 1) if options.quick else (options.gb, options.runs)
    print("| checkpoint | split | how | seconds (range) | GB/s placed | read | extra bytes a rank (predicted) |")
    print("|---|---|---|---|---|---|---|")
    for name, made in checkpoints(gb).items():
        with tempfile.TemporaryDirectory(prefix="rtp_llm-bench-", dir=options.dir) as folder:
            write_checkpoint(Path(folder), made)
            for row in ROWS:
                if row.checkpoint == name:
                    warm(sorted(Path(folder).glob("*.safetensors")))
                    print(_measured(row, folder, options.ranks, options.device, runs), flush=True)
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rank-local reads against reading once, on several GPUs.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gb", type=float, default=16.0, help="GB of each checkpoint, one at a time")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dir", help="where checkpoints are made; the system's temporary folder unless given")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _measured(row: Row, directory: str, ranks: int, device: str, runs: int) -> str:
    found = _launch(row, directory, ranks, device, runs)
    seconds = [max(rank[run]["seconds"] for rank in found) for run in range(runs)]
    placed, read = (sum(rank[-1][key] for rank in found) for key in ("bytes_placed", "bytes_read"))
    most = max((rank[-1] for rank in found), key=lambda report: report["predicted"])
    extra = "not measured" if most["peak"] is None else f"{most['peak'] / 1e6:.0f} MB"
    middle = statistics.median(seconds)
    return (
        f"| {row.checkpoint} | {row.split} {ranks} | {row.name} | {middle:.2f} ({min(seconds):.2f}-{max(seconds):.2f}) "
        f"| {placed / middle / 1e9:.1f} | {read / 1e9:.1f} GB | {extra} ({most['predicted'] / 1e6:.0f} MB) |"
    )


def _launch(row: Row, directory: str, ranks: int, device: str, runs: int) -> list[list[dict[str, Any]]]:
    """What each rank of one launch says of each of its runs."""
    task = {"row": vars(row), "directory": directory, "device": device, "runs": runs}
    return run_commands([[__file__, "--worker", json.dumps(task)]] * ranks, os.environ)


def _worker(task: dict[str, Any]) -> int:
    """One rank; what it measured is the last line of its stdout."""
    import torch
    import torch.distributed as dist

    from rtp_llm import LoadConfig, ParallelConfig, load_model

    row, rank, ranks = Row(**task["row"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    place = ParallelConfig(tp_size=ranks, tp_rank=rank) if row.split == "tp" else ParallelConfig(ep_size=ranks, ep_rank=rank)
    load = LoadConfig(device=task["device"], load_method=row.method, stacked_moe_mode=row.stacked_moe_mode, kernels="torch")
    found = []
    for _ in range(task["runs"]):
        report = load_model(task["directory"], parallel=place, load=load).report.to_json()
        assert report["effective_mode"] == row.method, report["degraded_reason"]
        peak, resident = report["measured_peak_bytes"], report["bytes_resident"]
        found.append(
            {
                "seconds": report["phases"]["transport"],
                "bytes_placed": report["bytes_placed"],
                "bytes_read": report["bytes_read"],
                "peak": None if peak is None else peak - resident,
                "predicted": report["predicted_peak_bytes"] - resident,
            }
        )
        # The weights are gone before the next run begins, as in a process of its own.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print(json.dumps(found))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except BenchError as error:
        raise SystemExit(str(error)) from None
