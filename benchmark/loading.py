"""How fast weights load: against other loaders and the machine's limits, by ranks that share a device, and how the time grows.

python benchmark/loading.py                       everything, on a Llama made for it
python benchmark/loading.py --quick               sizes for a laptop, one run each
python benchmark/loading.py --make 16 DIR         only makes a Llama of 16 GB
python benchmark/loading.py --only bytes,count --dir /mnt/nvme --json --plot growth.png
python benchmark/loading.py --minutes 8 --runs 3 --cold_runs 1 --contenders rtp-llm,instanttensor-tuned,safetensors --plot growth.png

Parts, in this order: bench (loaders, warm and cold), start (what a load does before its first byte), ranks (two processes on one
device, TP 2 and EP 2, and row-parallel matrices against column-parallel ones), threads, bytes, count.  With --minutes nothing is begun
after that time, and what is left out is said.

Growth is measured with files in the page cache, in fresh processes, by the median of --runs: seconds against bytes, against
the number of tensors at fixed bytes, and against reader threads.  The exponent is the slope of a line through the points on
logarithmic axes: 1 is linear, above is worse.  The steepest slope between two neighbouring points is shown as well, since a
flat beginning can hide a steep end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rtp_llm.bench.contenders import BY_NAME, CONTENDERS
from rtp_llm.bench.faults import BenchError
from rtp_llm.bench.growth import draw_growth, growth
from rtp_llm.bench.measure import environment, prepare_cache, run_bench, spawn
from rtp_llm.bench.plot import check_plot
from rtp_llm.bench.ranks import launch
from rtp_llm.bench.request import COLD, WARM, BenchRequest
from rtp_llm.bench.shards import compare_shards
from rtp_llm.bench.summary import machine
from rtp_llm.bench.synthetic import SyntheticCheckpoint, llama, many_tensors, qwen3_moe, write_checkpoint
from rtp_llm.checkpoint import read_catalog
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.errors import RtpLlmError
from rtp_llm.loader.device import resolve_device

PARTS = ("bench", "start", "ranks", "threads", "bytes", "count")

#: Of the memory that is available a checkpoint may take this part: it is in the page cache and in the parameters.
MEMORY_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: GB of the checkpoint for ``bench``, ``start``, ``ranks`` and ``threads``, and of that with experts for ``ranks``;
    GB, counts of tensors (with their GB), threads; runs with warm and with cold files."""

    checkpoint: float
    experts_gb: float
    bytes: tuple[float, ...]
    counts: tuple[int, ...]
    count_gb: float
    threads: tuple[int, ...]
    runs: int
    cold_runs: int


QUICK = Sizes(0.1, 0.05, (0.02, 0.05, 0.1), (100, 1000), 0.05, (1, 2), 1, 1)
FULL = Sizes(16, 4, (1, 2, 4, 8, 16, 32), (100, 1_000, 10_000, 100_000), 1.0, (1, 2, 4, 8, 16, 32), 5, 5)


class Budget:
    """Time for all of it; ``None``: as long as it takes."""

    def __init__(self, minutes: float | None) -> None:
        self._until = None if minutes is None else time.monotonic() + 60 * minutes

    def allows(self, what: str) -> bool:
        """Whether there is time to begin ``what``; says so where there is none."""
        if self._until is None or time.monotonic() < self._until:
            return True
        say(f"left out, the time is over: {what}")
        return False


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def request_for(
    directory: Path, device: str, runs: int, load: LoadConfig | None = None, names: Sequence[str] = ("rtp-llm",)
) -> BenchRequest:
    load = load or LoadConfig.from_environment(os.environ)
    return BenchRequest(read_catalog(directory), device, load, ParallelConfig(), tuple(names), runs)


def measured(request: BenchRequest) -> dict[str, Any]:
    """The median of some loads by our own reader, warm: seconds in all, and of each phase."""
    found = []
    for _ in range(request.runs):
        prepare_cache(request, WARM)
        line = spawn(request, BY_NAME["rtp-llm"])
        if isinstance(line, str):
            raise SystemExit(f"{request.catalog.directory}: {line}")
        found.append(line)
    seconds = sorted(line["seconds"] for line in found)
    phases = {name: statistics.median(line["phases"][name] for line in found) for name in found[0]["phases"]}
    return {
        "seconds": statistics.median(seconds),
        "range": [seconds[0], seconds[-1]],
        "processor_seconds": statistics.median(line["processor_seconds"] for line in found),
        "phases": phases,
        "bytes": found[0]["bytes"],
        "tensors": len(request.catalog.tensors),
        "peak_host_bytes": max(line["peak_host_bytes"] or 0 for line in found),
        "peak_device_bytes": max(line["peak_device_bytes"] or 0 for line in found),
    }


def fits(gb: float, directory: Path) -> bool:
    """Whether a checkpoint of this size may be made here; says why not."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _cached()
    room = shutil.disk_usage(directory).free
    if gb * 1e9 > MEMORY_SHARE * available or gb * 1e9 > 0.9 * room:
        say(f"left out: {gb:g} GB, with {available / 1e9:.0f} GB of memory and {room / 1e9:.0f} GB of disk to use")
        return False
    return True


def _cached() -> int:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["Cached"].split()[0]) * 1024


def on_made(made: SyntheticCheckpoint, scratch: Path, device: str, runs: int) -> dict[str, Any]:
    """Measures a checkpoint that is made for it and removed."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="growth-") as name:
        write_checkpoint(Path(name), made)
        return measured(request_for(Path(name), device, runs))


def starting(checkpoint: Path, device: str, runs: int) -> dict[str, Any]:
    """Seconds of each step before the first byte, by the median of fresh processes."""
    command = [sys.executable, "-m", "rtp_llm.bench.start", str(checkpoint), "--device", device]
    found = []
    for _ in range(runs):
        done = subprocess.run(command, env=environment(BY_NAME["rtp-llm"]), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"start: {done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    say("start: " + ", ".join(f"{name} {seconds:.4f} s" for name, seconds in medians.items()))
    return medians


def sharing(sizes: Sizes, checkpoint: Path, scratch: Path, device: str, budget: Budget) -> list[dict[str, Any]]:
    """Two processes that load to one device at once: halves of every matrix, and of the experts."""
    experts = scratch / "experts"
    kind = device.partition(":")[0]  # each process takes the device of its local number, or shares the only one
    rows = []
    for name, directory, places in (
        ("Llama, TP 2", checkpoint, [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]),
        ("experts, EP 2", experts, [ParallelConfig(ep_size=2, ep_rank=rank) for rank in range(2)]),
    ):
        if not budget.allows(name):
            continue
        if directory == experts:
            write_checkpoint(experts, qwen3_moe(sizes.experts_gb))
        load = dataclasses.replace(LoadConfig.from_environment(os.environ), device=kind, load_method="scratch", kernels="torch")
        found = []
        for _ in range(sizes.runs):
            prepare_cache(request_for(directory, device, 1), WARM)
            found.append(launch(str(directory), places, load))
        seconds = sorted(max(rank["seconds"] for rank in ranks) for ranks in found)
        row = {
            "name": name,
            "seconds": statistics.median(seconds),
            "range": [seconds[0], seconds[-1]],
            "bytes": sum(rank["bytes_placed"] for rank in found[0]),
            "bytes_read": sum(rank["bytes_read"] for rank in found[0]),
            "extra_bytes": max(rank["extra_bytes"] or 0 for ranks in found for rank in ranks),
            "runs": found,
        }
        say(f"ranks: {name}: {row['seconds']:.3f} s, {row['bytes'] / 1e9 / row['seconds']:.2f} GB/s")
        rows.append(row)
    return rows


def against_bytes(sizes: Sizes, scratch: Path, device: str, budget: Budget) -> dict[str, Any]:
    points = []
    for gb in sizes.bytes:
        if fits(gb, scratch) and budget.allows(f"{gb:g} GB"):
            point = on_made(llama(gb), scratch, device, sizes.runs)
            say(f"bytes: {point['bytes'] / 1e9:.2f} GB: {point['seconds']:.3f} s")
            points.append((point["bytes"] / 1e9, point))
    return growth("GB", points)


def against_count(sizes: Sizes, scratch: Path, device: str, budget: Budget) -> dict[str, Any]:
    points = []
    for count in sizes.counts:
        if not budget.allows(f"{count} tensors"):
            continue
        point = on_made(many_tensors(count, int(sizes.count_gb * 1e9)), scratch, device, sizes.runs)
        say(f"count: {point['tensors']} tensors, {point['bytes'] / 1e9:.2f} GB: {point['seconds']:.3f} s")
        points.append((float(point["tensors"]), point))
    return growth("tensors", points)


def against_threads(sizes: Sizes, checkpoint: Path, device: str, budget: Budget) -> dict[str, Any]:
    points = []
    for threads in sizes.threads:
        if not budget.allows(f"{threads} threads"):
            continue
        load = dataclasses.replace(LoadConfig.from_environment(os.environ), reader_threads=threads)
        point = measured(request_for(checkpoint, device, sizes.runs, load))
        say(f"threads: {threads}: {point['seconds']:.3f} s")
        points.append((float(threads), point))
    return growth("threads", points)


def show(document: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, one in document["growth"].items():
        table = Table(
            "x", "GB", "tensors", "median s", "range", "processor s", "GB/s", "phases", title=f"{name}: seconds against {one['against']}"
        )
        for point in one["points"]:
            low, high = point["range"]
            phases = ", ".join(f"{phase} {spent:.2f}" for phase, spent in point["phases"].items() if spent >= 0.005)
            speed = point["bytes"] / 1e9 / point["seconds"]
            cells = (f"{point['bytes'] / 1e9:.2f}", f"{point['tensors']}", f"{point['seconds']:.3f}", f"{low:.3f} to {high:.3f}")
            table.add_row(f"{point['x']:g}", *cells, f"{point['processor_seconds']:.3f}", f"{speed:.2f}", phases)
        console.print(table)
        slopes = (one[name] for name in ("exponent", "steepest", "exponent_of_processor", "exponent_of_transport"))
        shown = ["none" if slope is None else f"{slope:.2f}" for slope in slopes]
        console.print(
            f"exponent {shown[0]}, steepest between two points {shown[1]}; of processor time {shown[2]}, of moving bytes alone {shown[3]}"
        )
    if document["bench"]:
        table = Table("cache", "loader", "median s", "range", "GB/s", "of limit", "phases", title="loaders")
        for one in document["bench"]:
            for row in one["contenders"]:
                for state, result in row["results"].items():
                    low, high = result["range"]
                    ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
                    cells = (f"{result['seconds']:.3f}", f"{low:.3f} to {high:.3f}", f"{result['gb_per_s']:.2f}", ratio)
                    table.add_row(state, row["name"], *cells, phases_of(result["runs"]))
                if row["status"] != "measured":
                    table.add_row("", row["name"], row["status"], row["reason"], "", "", "")
        console.print(table)
    if document["start"]:
        table = Table("step", "seconds", title="before the first byte, each alone")
        for name, seconds in document["start"].items():
            table.add_row(name, f"{seconds:.4f}")
        console.print(table)
    if document["ranks"]:
        table = Table("ranks", "median s", "range", "GB/s", "read GB", "extra MB a rank", title="two processes, one device")
        for row in document["ranks"]:
            low, high = row["range"]
            speed = row["bytes"] / 1e9 / row["seconds"]
            cells = (f"{row['seconds']:.3f}", f"{low:.3f} to {high:.3f}", f"{speed:.2f}", f"{row['bytes_read'] / 1e9:.2f}")
            table.add_row(row["name"], *cells, f"{row['extra_bytes'] / 1e6:.0f}")
        console.print(table)
    if document["shards"]:
        table = Table("matrices", "median GB/s", "range", "read of kept", title="TP 2, two processes, one device")
        for kind, one in document["shards"].items():
            if not one["bytes"]:
                continue  # a model without such matrices
            rates = sorted(rate / 1e9 for rate in one["bytes_per_s"])
            cells = (f"{statistics.median(rates):.2f}", f"{rates[0]:.2f} to {rates[-1]:.2f}", f"{one['bytes_read'] / one['bytes']:.2f}")
            table.add_row(f"{kind}-parallel", *cells)
        console.print(table)


def phases_of(runs: Sequence[dict[str, Any]]) -> str:
    """Medians of the phases of our own loads, in milliseconds."""
    known = [run["phases"] for run in runs if "phases" in run]
    names = known[0] if known else ()
    medians = {name: statistics.median(phases[name] for phases in known) for name in names}
    return ", ".join(f"{name} {1000 * seconds:.0f}" for name, seconds in medians.items() if seconds >= 0.0005)


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one run each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the growth; takes matplotlib")
    parser.add_argument("--make", nargs=2, metavar=("GB", "DIR"), help="only make a checkpoint")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--dir", type=Path, help="where checkpoints are made; the system's temporary directory unless given")
    parser.add_argument("--checkpoint", type=Path, help="the checkpoint for bench and threads; one is made unless given")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda:N")
    parser.add_argument("--runs", type=int, help="runs of each measurement with warm files")
    parser.add_argument("--cold_runs", type=int, help="runs of each loader with cold files; 0 for none; as --runs unless given")
    parser.add_argument("--minutes", type=float, help="begin nothing new after this time")
    parser.add_argument("--sizes", help="GB to measure growth with, as 1,2,4")
    parser.add_argument("--counts", help="numbers of tensors, as 100,1000")
    parser.add_argument("--count_gb", type=float, help="GB of a checkpoint of many tensors")
    parser.add_argument("--threads", help="reader threads, as 1,2,4")
    parser.add_argument("--contenders", help="loaders to compare, as rtp-llm,safetensors; all unless given")
    return parser.parse_args(argv)


def sizes_of(options: argparse.Namespace) -> Sizes:
    sizes = QUICK if options.quick else FULL
    changes: dict[str, Any] = {}
    if options.sizes:
        changes["bytes"] = tuple(map(float, options.sizes.split(",")))
    if options.counts:
        changes["counts"] = tuple(map(int, options.counts.split(",")))
    if options.threads:
        changes["threads"] = tuple(map(int, options.threads.split(",")))
    if options.count_gb:
        changes["count_gb"] = options.count_gb
    if options.runs:
        changes["runs"] = changes["cold_runs"] = options.runs
    if options.cold_runs is not None:
        changes["cold_runs"] = options.cold_runs
    return dataclasses.replace(sizes, **changes)


def run(options: argparse.Namespace) -> dict[str, Any]:
    parts, sizes, budget = options.only.split(","), sizes_of(options), Budget(options.minutes)
    device = str(resolve_device(options.device, 0))
    document: dict[str, Any] = {"machine": machine([]), "device": device, "runs": sizes.runs, "cold_runs": sizes.cold_runs}
    document |= {"bench": [], "start": {}, "ranks": [], "shards": {}, "growth": {}}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="rtp-llm-loading-") as name:
        scratch = Path(name)
        checkpoint = options.checkpoint
        if checkpoint is None and {"bench", "start", "ranks", "threads"} & set(parts):
            checkpoint = scratch / "llama"
            gb = next(size for size in (sizes.checkpoint, *sorted(sizes.bytes, reverse=True), 0.1) if fits(size, scratch))
            write_checkpoint(checkpoint, llama(gb))
        if "bench" in parts:
            names = options.contenders.split(",") if options.contenders else [c.name for c in CONTENDERS]
            for state, runs in ((WARM, sizes.runs), (COLD, sizes.cold_runs)):
                if runs and budget.allows(f"{state} loads"):
                    asked = dataclasses.replace(request_for(checkpoint, device, runs, names=names), states=(state,))
                    try:
                        document["bench"].append(run_bench(asked, say, lambda: budget.allows("further turns")))
                    except BenchError as error:  # a page cache that cannot be emptied; the rest can be measured
                        say(f"left out, {state} loads: {error}")
        if "start" in parts and budget.allows("start"):
            document["start"] = starting(checkpoint, device, sizes.runs)
        if "ranks" in parts:
            document["ranks"] = sharing(sizes, checkpoint, scratch, device, budget)
            if budget.allows("rows against columns"):
                prepare_cache(request_for(checkpoint, device, 1), WARM)
                document["shards"] = compare_shards(str(checkpoint), 2, device.partition(":")[0], sizes.runs)
        if "threads" in parts:
            document["growth"]["threads"] = against_threads(sizes, checkpoint, device, budget)
        if "bytes" in parts:
            document["growth"]["bytes"] = against_bytes(sizes, scratch, device, budget)
        if "count" in parts:
            document["growth"]["count"] = against_count(sizes, scratch, device, budget)
    return document


def main(argv: Sequence[str] | None = None) -> int:
    options = options_of(argv)
    if options.make:
        made = llama(float(options.make[0]))
        write_checkpoint(Path(options.make[1]), made)
        say(f"{options.make[1]}: {made.nbytes / 1e9:.2f} GB in {len(made.shapes)} tensors")
        return 0
    try:
        if options.plot:
            check_plot(options.plot)
        document = run(options)
    except RtpLlmError as error:
        say(str(error))
        return 2
    found = [one for one in document["growth"].values() if one["points"]]
    if options.plot and found:
        draw_growth(options.plot, found)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)
    problems = [problem for one in document["bench"] for problem in one["problems"]]
    for problem in problems:
        say(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
