"""Loading by fastsafetensors against the own reader: chunk sizes, reads around the page cache, ranks that share a device.

python benchmark/run_fastsafetensors.py                  a Llama of 16 GB, up to five runs a row in at most five minutes
python benchmark/run_fastsafetensors.py --quick          sizes for a laptop, one run each
python benchmark/run_fastsafetensors.py --checkpoint DIR --device cuda:0 --runs 3 --minutes 10

Rows take turns: first each is run once, whatever the time, then again while there is time for it; so a table that was cut short has
every row, and no row had the quiet minutes to itself.

Every run is a fresh process, or a group of them over gloo (ranks of one device cannot speak NCCL).  Seconds and GB/s are
those of the phase in which bytes move; a group's are those of its slowest rank.  Extra bytes are the peak beyond the weights, by
torch's allocator on a GPU, by the kernel's count on the CPU.  Prints the table of ``benchmark/fastsafetensors.md``.

Not named like the package: Python looks for modules beside the script first, and would take it for the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtp_llm.bench.cache import evict, warm
from rtp_llm.bench.faults import BenchError
from rtp_llm.bench.ranks import run_commands
from rtp_llm.bench.synthetic import llama, write_checkpoint

#: Longest time of one run: a cold load of 16 GB from a disk of 200 MB/s.
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Row:
    """A way of loading: its name, environment, number of ranks, and in which states of the page cache it is measured."""

    name: str
    environ: Mapping[str, str] = field(default_factory=dict)
    ranks: int = 1
    caches: tuple[str, ...] = ("warm", "cold")


def _fastsafetensors(**environ: str) -> dict[str, str]:
    return {"LOAD_METHOD": "fastsafetensors", **environ}


def _chunks(mib: int, **more: object) -> dict[str, str]:
    parallel = {"use_pipeline": True, "queue_size": 0, "max_batch_bytes": mib << 20}
    return _fastsafetensors(FASTSAFETENSORS_CONFIG_JSON=json.dumps({"parallel": parallel, "base": more}))


ROWS = (
    Row("scratch", {"LOAD_METHOD": "scratch"}),
    Row("fastsafetensors", _fastsafetensors()),
    Row("fastsafetensors, around the page cache", _fastsafetensors(FASTSAFETENSORS_ODIRECT="1")),
    Row("fastsafetensors, chunks of 64 MiB", _chunks(64), caches=("warm",)),
    Row("fastsafetensors, chunks of 1 GiB", _chunks(1024), caches=("warm",)),
    Row("fastsafetensors, 64 MiB bounce buffers", _chunks(256, bbuf_size_kb=64 << 10), caches=("warm",)),
    Row("fastsafetensors, 64 MiB bounce buffers, 32 threads", _chunks(256, bbuf_size_kb=64 << 10, max_threads=32), caches=("warm",)),
    Row("scratch, 2 ranks", {"LOAD_METHOD": "scratch"}, ranks=2),
    Row("fastsafetensors, 2 ranks, each file read once", _fastsafetensors(), ranks=2),
)


@dataclass
class Case:
    """A row in one state of the page cache, and what came of its runs: the reports of all ranks, seconds of the last one."""

    row: Row
    cache: str
    found: list[list[dict[str, Any]]] = field(default_factory=list)
    reason: str = ""
    took: float = 0.0


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    if options.rank_of is not None:
        return _one(options.rank_of, options.device)
    started = time.monotonic()
    with _checkpoint(options.checkpoint, 0.1 if options.quick else 16.0) as directory:
        cases = [Case(row, cache) for row in ROWS for cache in row.caches if not options.only or f"{row.name}, {cache}" in options.only]
        for turn in range(options.runs or (1 if options.quick else 5)):
            for case in cases:
                left = 60 * options.minutes - (time.monotonic() - started)
                if not case.reason and (turn == 0 or case.took < left):
                    _run_once(case, directory, options.device)
    print("| how | page cache | runs | seconds (range) | GB/s | extra bytes a rank (predicted) |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        print(_line(case))
    return 0


def _run_once(case: Case, directory: Path, device: str) -> None:
    begun = time.monotonic()
    files = sorted(directory.glob("*.safetensors"))
    if case.cache == "warm":
        warm(files)
    else:
        eviction = evict(files, drop_caches=True)
        if eviction.reason is not None:
            case.reason = eviction.reason
            return
    case.found.append(_run(case.row, directory, device))
    case.took = time.monotonic() - begun
    print(f"{case.row.name}, {case.cache}: {case.took:.0f} s", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Loading by fastsafetensors against the own reader.")
    parser.add_argument("--checkpoint", type=Path, help="a checkpoint directory; without it one is made and removed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--runs", type=int, help="at most so many of each row")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=[f"{row.name}, {cache}" for row in ROWS for cache in row.caches])
    parser.add_argument("--minutes", type=float, default=5.0, help="a row is run again only if that ends within them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


@contextmanager
def _checkpoint(given: Path | None, gb: float) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="rtp_llm-bench-") as folder:
        write_checkpoint(Path(folder), llama(gb))
        yield Path(folder)


def _line(case: Case) -> str:
    name = case.row.name
    if not case.found:
        return f"| {name} | {case.cache} | 0 | not measured: {case.reason} | | |"
    seconds = [max(report["phases"]["transport"] for report in reports) for reports in case.found]
    placed = sum(report["bytes_placed"] for report in case.found[0])
    last, middle = case.found[-1][0], statistics.median(seconds)
    weights, peak = last["bytes_resident"], last["measured_peak_bytes"]
    extra = "not measured" if peak is None else f"{(peak - weights) / 1e6:.0f} MB"
    predicted = f"{(last['predicted_peak_bytes'] - weights) / 1e6:.0f} MB"
    name = f"{name} ({last['degraded_reason']})" if last["degraded_reason"] else name
    spread = f"{middle:.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    return f"| {name} | {case.cache} | {len(seconds)} | {spread} | {placed / middle / 1e9:.1f} | {extra} ({predicted}) |"


def _run(row: Row, directory: Path, device: str) -> list[dict[str, Any]]:
    """The ranks' load reports."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOAD_METHOD")
    clean = {name: value for name, value in os.environ.items() if name not in names and not name.startswith("FASTSAFETENSORS_")}
    command = [__file__, "--rank-of", str(directory), "--device", device]
    return run_commands([command] * row.ranks, {**clean, **row.environ}, _TIMEOUT_S)


def _one(directory: Path, device: str) -> int:
    """One rank's load; its report is the last line of stdout."""
    import torch.distributed as dist

    from rtp_llm import LoadConfig, load_model

    loaded = load_model(directory, device=device, load=dataclasses.replace(LoadConfig.from_environment(os.environ), kernels="torch"))
    print(json.dumps(loaded.report.to_json()))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except BenchError as error:
        raise SystemExit(str(error)) from None
