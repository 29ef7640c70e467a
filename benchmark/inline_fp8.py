"""FP8 made while loading against loading plain: seconds, and the peak against its prediction.

python benchmark/inline_fp8.py                16 GB of bfloat16 (a Llama of 8B), five runs each, on the first GPU or the CPU
python benchmark/inline_fp8.py --quick        0.2 GB, one run
python benchmark/inline_fp8.py --gb 16 --runs 3 --json

Every run is a fresh process; files are in the page cache, since they have just been written and are read once before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: No quantisation first: what the others are compared with.
METHODS = ("none", "inline-fp8-tensor", "inline-fp8-channel", "inline-fp8-block")


def measure(directory: str, method: str) -> dict[str, Any]:
    """One load in this process."""
    import torch

    from rtp_llm import LoadConfig, load_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.empty(1, device=device)  # the context is no part of a load
    quantization = None if method == "none" else method
    load = LoadConfig(device=device, load_method="scratch", quantization=quantization, kernels="torch", progress=False)
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    report = load_model(directory, load=load).report
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": report.seconds,
        "transport_s": report.phases["transport"],
        "finish_s": report.phases["finish"],
        "bytes_read": report.bytes_read,
        "resident": report.plan.bytes_resident,
        "predicted_peak": report.budget.peak,
        "measured_peak": report.measured_peak_bytes,
        # What torch has taken from the device, blocks that its allocator keeps included.
        "reserved_peak": torch.cuda.max_memory_reserved() - before if device == "cuda" else None,
    }


def run(directory: Path, method: str, runs: int) -> dict[str, Any]:
    """The median run, and the range of seconds."""
    results = []
    for _ in range(runs):
        command = [sys.executable, __file__, "--one", str(directory), method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{method}: {done.stderr.strip()[-2000:]}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    middle = sorted(results, key=lambda r: r["seconds"])[len(results) // 2]
    seconds = [r["seconds"] for r in results]
    return {"method": method, **middle, "seconds": statistics.median(seconds), "range": [min(seconds), max(seconds)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, and one run each")
    parser.add_argument("--gb", type=float, default=16.0, help="size of the checkpoint in 10**9 bytes")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dir", help="where the checkpoint is written; a temporary directory otherwise")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("DIR", "METHOD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.one)))
        return
    gb, runs = (0.2, 1) if args.quick else (args.gb, args.runs)

    from rtp_llm.bench.synthetic import llama, write_checkpoint

    with tempfile.TemporaryDirectory(dir=args.dir, prefix="inline-fp8-") as folder:
        write_checkpoint(Path(folder, "model"), llama(gb))
        run(Path(folder, "model"), "none", 1)
        rows = [run(Path(folder, "model"), method, runs) for method in METHODS]
    if args.json:
        print(json.dumps(rows))
        return
    table = Table(title=f"{gb} GB of bfloat16 on {rows[0]['device']}, torch {rows[0]['torch']}, {runs} run(s)")
    columns = ("method", "seconds", "range", "transport s", "finish s", "resident GB", "predicted peak GB", "measured peak GB")
    for column in (*columns, "reserved peak GB"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows:
        measured, reserved = ("unknown" if n is None else f"{n / 1e9:.2f}" for n in (row["measured_peak"], row["reserved_peak"]))
        low, high = row["range"]
        table.add_row(
            row["method"],
            f"{row['seconds']:.2f}",
            f"{low:.2f} - {high:.2f}",
            f"{row['transport_s']:.2f}",
            f"{row['finish_s']:.2f}",
            f"{row['resident'] / 1e9:.2f}",
            f"{row['predicted_peak'] / 1e9:.2f}",
            measured,
            reserved,
        )
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
