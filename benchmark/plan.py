"""How long planning takes at full size: real headers, real shapes, sparse files without data.

python benchmark/plan.py            each case in five fresh processes
python benchmark/plan.py --quick    one process a case
python benchmark/plan.py --json
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RUNS = 5


@dataclass(frozen=True)
class Case:
    """A checkpoint and the rank that is planned; ``tp`` 0 stops at the catalogue."""

    name: str
    checkpoint: str
    tp: int = 0
    ep: int = 1


CASES = (
    Case("catalogue of DeepSeek-V3 (163 shards)", "deepseek_v3"),
    Case("catalogue of Llama-3-70B (30 shards)", "llama_3_70b"),
    Case("plan of Llama-3-70B, TP 8", "llama_3_70b", 8),
    Case("plan of DeepSeek-V3, FP8 with its scales, TP 8, EP 64", "deepseek_v3", 8, 64),
)


def make(name: str, directory: Path) -> None:
    """Writes a checkpoint's headers and index at full size; the data is holes."""
    # What writes them is a helper of the tests, which are not installed: they lie beside this folder.
    sys.path.append(str(Path(__file__).absolute().parents[1]))
    from tests.support import sparse

    configs = {"deepseek_v3": (sparse.DEEPSEEK_V3_CONFIG, 163), "llama_3_70b": (sparse.LLAMA_3_70B_CONFIG, 30)}
    config, shards = configs[name]
    sparse.write_sparse_checkpoint(directory, getattr(sparse, name)(), shards, config)


def measure(directory: str, tp: int, ep: int) -> dict[str, float]:
    """One run in this process: seconds without imports, by the wall and of the processor, resident MiB at the peak, tensors, bytes."""
    from rtp_llm.checkpoint import read_catalog

    if tp:
        from rtp_llm import LoadConfig, ParallelConfig, build_plan
        from rtp_llm.models.registry import FAMILIES

        for family in FAMILIES:
            family.load()
        start = _clocks()
        plan = build_plan(directory, ParallelConfig(tp, tp - 1, ep, ep - 1), LoadConfig(device="cpu"))
        took = _since(start)
        plan.raise_for_problems()
        tensors, nbytes = len(plan.catalog.tensors), plan.bytes_read
    else:
        start = _clocks()
        catalog = read_catalog(directory)
        took = _since(start)
        catalog.raise_for_problems()
        tensors, nbytes = len(catalog.tensors), sum(t.nbytes for t in catalog.tensors)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**took, "peak_mib": peak, "tensors": tensors, "bytes": nbytes}


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> dict[str, float]:
    """Seconds by the clock on the wall, and of the processor, which other work on the machine takes no part of."""
    wall, processor = _clocks()
    return {"seconds": wall - start[0], "processor_seconds": processor - start[1]}


def run(case: Case, directory: Path, runs: int) -> dict[str, object]:
    results = []
    for _ in range(runs):
        command = [sys.executable, __file__, "--one", str(directory), str(case.tp), str(case.ep)]
        results.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    seconds = sorted(r["seconds"] for r in results)
    first = results[0]
    return {
        "case": case.name,
        "seconds": statistics.median(seconds),
        "range": [seconds[0], seconds[-1]],
        "processor_seconds": statistics.median(r["processor_seconds"] for r in results),
        "peak_mib": max(r["peak_mib"] for r in results),
        "tensors": first["tensors"],
        "bytes": first["bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one run a case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--one", nargs=3, metavar=("DIR", "TP", "EP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        directory, tp, ep = options.one
        print(json.dumps(measure(directory, int(tp), int(ep))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            directory = Path(scratch, case.checkpoint)
            if not directory.exists():
                make(case.checkpoint, directory)
            rows.append(run(case, directory, 1 if options.quick else RUNS))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("case", "tensors", "GB", "median s", "range", "processor s", "peak MiB")
    for row in rows:
        low, high = row["range"]
        table.add_row(
            row["case"],
            f"{row['tensors']:,.0f}",
            f"{row['bytes'] / 1e9:.1f}",
            f"{row['seconds']:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{row['processor_seconds']:.2f}",
            f"{row['peak_mib']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
