"""How fast weights load: against other loaders and the machine's limits, and how the time grows.

python benchmark/loading.py                       everything, on a Llama made for it
python benchmark/loading.py --quick               sizes for a laptop, one run each
python benchmark/loading.py --make 16 DIR         only makes a Llama of 16 GB
python benchmark/loading.py --only bytes,count --dir /mnt/nvme --json --plot growth.png

Growth is measured with files in the page cache, in fresh processes, by the median of --runs: seconds against bytes, against
the number of tensors at fixed bytes, and against reader threads.  The exponent is the slope of a line through the points on
logarithmic axes: 1 is linear, above is worse.  The steepest slope between two neighbouring points is shown as well, since a
flat beginning can hide a steep end.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rtp_llm.bench.contenders import BY_NAME, CONTENDERS
from rtp_llm.bench.measure import bench, prepare, spawn
from rtp_llm.bench.plot import check_plot
from rtp_llm.bench.request import COLD, WARM, Request
from rtp_llm.bench.summary import machine
from rtp_llm.bench.synthetic import Made, llama, many_tensors, write_checkpoint
from rtp_llm.checkpoint import read_catalog
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.errors import RtpLlmError
from rtp_llm.loader.device import resolve_device

PARTS = ("bench", "bytes", "count", "threads")

#: Of the memory that is available a checkpoint may take this part: it is in the page cache and in the parameters.
MEMORY_SHARE = 0.4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: GB of the checkpoint for ``bench`` and ``threads``; GB, counts of tensors (with their GB), threads."""

    checkpoint: float
    bytes: tuple[float, ...]
    counts: tuple[int, ...]
    count_gb: float
    threads: tuple[int, ...]
    runs: int


QUICK = Sizes(0.1, (0.02, 0.05, 0.1), (100, 1000), 0.05, (1, 2), 1)
FULL = Sizes(16, (1, 2, 4, 8, 16, 32), (100, 1_000, 10_000, 100_000), 1.0, (1, 2, 4, 8, 16, 32), 5)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def request_for(directory: Path, device: str, runs: int, load: LoadConfig | None = None, names: Sequence[str] = ("rtp-llm",)) -> Request:
    load = load or LoadConfig.from_environment(os.environ)
    return Request(read_catalog(directory), device, load, ParallelConfig(), tuple(names), runs)


def measured(request: Request) -> dict[str, Any]:
    """The median of some loads by our own reader, warm: seconds in all, and of each phase."""
    found = []
    for _ in range(request.runs):
        prepare(request, WARM)
        line = spawn(request, BY_NAME["rtp-llm"])
        if isinstance(line, str):
            raise SystemExit(f"{request.catalog.directory}: {line}")
        found.append(line)
    seconds = sorted(line["seconds"] for line in found)
    phases = {name: statistics.median(line["phases"][name] for line in found) for name in found[0]["phases"]}
    return {
        "seconds": statistics.median(seconds),
        "range": [seconds[0], seconds[-1]],
        "phases": phases,
        "bytes": found[0]["bytes"],
        "tensors": len(request.catalog.tensors),
        "peak_host_bytes": max(line["peak_host_bytes"] or 0 for line in found),
        "peak_device_bytes": max(line["peak_device_bytes"] or 0 for line in found),
    }


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The slope of the least-squares line through the points' logarithms; None for fewer than two."""
    if len(set(xs)) < 2:
        return None
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(y) for y in ys]).slope


def steepest(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """The largest slope between neighbouring points, on logarithmic axes; None for fewer than two."""
    points = sorted(zip(xs, ys, strict=True))
    slopes = [math.log(d / b) / math.log(c / a) for (a, b), (c, d) in zip(points, points[1:], strict=False) if c > a]
    return max(slopes, default=None)


def growth(label: str, points: Sequence[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    xs = [x for x, _ in points]
    seconds, moving = [p["seconds"] for _, p in points], [p["phases"]["transport"] for _, p in points]
    return {
        "against": label,
        "exponent": exponent(xs, seconds),
        "steepest": steepest(xs, seconds),
        "exponent_of_transport": exponent(xs, moving),
        "points": [{"x": x, **p} for x, p in points],
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


def on_made(made: Made, scratch: Path, device: str, runs: int) -> dict[str, Any]:
    """Measures a checkpoint that is made for it and removed."""
    with tempfile.TemporaryDirectory(dir=scratch, prefix="growth-") as name:
        write_checkpoint(Path(name), made)
        return measured(request_for(Path(name), device, runs))


def against_bytes(sizes: Sizes, scratch: Path, device: str) -> dict[str, Any]:
    points = []
    for gb in sizes.bytes:
        if fits(gb, scratch):
            point = on_made(llama(gb), scratch, device, sizes.runs)
            say(f"bytes: {point['bytes'] / 1e9:.2f} GB: {point['seconds']:.3f} s")
            points.append((point["bytes"] / 1e9, point))
    return growth("GB", points)


def against_count(sizes: Sizes, scratch: Path, device: str) -> dict[str, Any]:
    points = []
    for count in sizes.counts:
        point = on_made(many_tensors(count, int(sizes.count_gb * 1e9)), scratch, device, sizes.runs)
        say(f"count: {point['tensors']} tensors, {point['bytes'] / 1e9:.2f} GB: {point['seconds']:.3f} s")
        points.append((float(point["tensors"]), point))
    return growth("tensors", points)


def against_threads(sizes: Sizes, checkpoint: Path, device: str) -> dict[str, Any]:
    points = []
    for threads in sizes.threads:
        load = dataclasses.replace(LoadConfig.from_environment(os.environ), reader_threads=threads)
        point = measured(request_for(checkpoint, device, sizes.runs, load))
        say(f"threads: {threads}: {point['seconds']:.3f} s")
        points.append((float(threads), point))
    return growth("threads", points)


def draw(file: Path, document: dict[str, Any]) -> None:
    """Seconds against each of the three on logarithmic axes, with a linear slope to compare."""
    from matplotlib.figure import Figure

    found = [document["growth"][name] for name in ("bytes", "count", "threads") if name in document["growth"]]
    if not found:
        return
    figure = Figure(figsize=(5 * len(found), 4), layout="constrained")
    for axes, one in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
        xs, ys = [p["x"] for p in one["points"]], [p["seconds"] for p in one["points"]]
        axes.loglog(xs, ys, "o-", label="load")
        axes.loglog(xs, [p["phases"]["transport"] for p in one["points"]], "s-", label="of it moving bytes")
        axes.loglog(xs, [ys[0] * x / xs[0] for x in xs], "k--", linewidth=1, label="linear")
        slope = "" if one["exponent"] is None else f", exponent {one['exponent']:.2f}"
        axes.set_title(f"seconds against {one['against']}{slope}")
        axes.set_xlabel(one["against"])
        axes.set_ylim(min(ys) / 3, max(ys) * 3)
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def show(document: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 200)
    for name, one in document["growth"].items():
        table = Table("x", "GB", "tensors", "median s", "range", "GB/s", "phases", title=f"{name}: seconds against {one['against']}")
        for point in one["points"]:
            low, high = point["range"]
            phases = ", ".join(f"{phase} {spent:.2f}" for phase, spent in point["phases"].items() if spent >= 0.005)
            speed = point["bytes"] / 1e9 / point["seconds"]
            cells = (f"{point['bytes'] / 1e9:.2f}", f"{point['tensors']}", f"{point['seconds']:.3f}", f"{low:.3f} to {high:.3f}")
            table.add_row(f"{point['x']:g}", *cells, f"{speed:.2f}", phases)
        console.print(table)
        shown = ["none" if e is None else f"{e:.2f}" for e in (one["exponent"], one["steepest"], one["exponent_of_transport"])]
        console.print(f"exponent {shown[0]}, steepest between two points {shown[1]}; of moving bytes alone {shown[2]}")
    if document["bench"] is not None:
        table = Table("cache", "loader", "median s", "range", "GB/s", "of limit", title="loaders")
        for row in document["bench"]["contenders"]:
            for state, result in row["results"].items():
                low, high = result["range"]
                ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
                table.add_row(
                    state, row["name"], f"{result['seconds']:.3f}", f"{low:.3f} to {high:.3f}", f"{result['gb_per_s']:.2f}", ratio
                )
            if row["status"] != "measured":
                table.add_row("", row["name"], row["status"], row["reason"], "", "")
        console.print(table)


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
    parser.add_argument("--runs", type=int, help="runs of each measurement")
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
        changes["runs"] = options.runs
    return dataclasses.replace(sizes, **changes)


def run(options: argparse.Namespace) -> dict[str, Any]:
    parts, sizes = options.only.split(","), sizes_of(options)
    device = str(resolve_device(options.device, 0))
    document: dict[str, Any] = {"machine": machine([]), "device": device, "runs": sizes.runs, "bench": None, "growth": {}}
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="rtp-llm-loading-") as name:
        scratch = Path(name)
        checkpoint = options.checkpoint
        if checkpoint is None and {"bench", "threads"} & set(parts):
            checkpoint = scratch / "llama"
            gb = next(size for size in (sizes.checkpoint, *sorted(sizes.bytes, reverse=True), 0.1) if fits(size, scratch))
            write_checkpoint(checkpoint, llama(gb))
        if "bench" in parts:
            names = options.contenders.split(",") if options.contenders else [c.name for c in CONTENDERS]
            asked = request_for(checkpoint, device, sizes.runs, names=names)
            document["bench"] = bench(dataclasses.replace(asked, states=(WARM, COLD)), say)
        if "threads" in parts:
            document["growth"]["threads"] = against_threads(sizes, checkpoint, device)
        if "bytes" in parts:
            document["growth"]["bytes"] = against_bytes(sizes, scratch, device)
        if "count" in parts:
            document["growth"]["count"] = against_count(sizes, scratch, device)
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
    if options.plot:
        draw(options.plot, document)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        show(document)
    problems = document["bench"]["problems"] if document["bench"] else []
    for problem in problems:
        say(f"problem: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
