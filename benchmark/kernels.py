"""Norms, gates and rotations by each back end: microseconds a call, in turns, and the ratio to torch's.

python benchmark/kernels.py                the sizes of an 8B Llama, one token and 8192, on the first GPU (or the CPU, torch alone)
python benchmark/kernels.py --quick        small sizes
python benchmark/kernels.py --graph        each call recorded in a CUDA graph: what a decoding step pays
python benchmark/kernels.py --json

Back ends take turns, call by call of each operation, so that a machine that gets slower does so for all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.compile import Compilation
from rtp_llm.kernels.functions import device_facts, find_unsupported
from rtp_llm.kernels.interface import Kernels
from rtp_llm.kernels.needs import GateNeed, KernelNeed, NormNeed, RotaryNeed
from rtp_llm.kernels.symbols import resolve_symbol
from rtp_llm.kernels.torch_kernels import TORCH

#: Turns of each back end; the median counts.
TURNS = 7
#: Seconds of calls in one turn: thousands of them for the smallest sizes.
TURN_SECONDS = 0.02
#: Calls in one recorded graph.
_RECORDED = 10


@dataclass(frozen=True)
class Sizes:
    """Of one layer."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    tokens: tuple[int, ...]


WHOLE = Sizes(4096, 14336, 32, 8, 128, (1, 64, 8192))
QUICK = Sizes(256, 512, 4, 2, 64, (1, 64))

Call = Callable[[], Any]


class Tensors:
    """What the operations of one layer work on, for so many tokens."""

    def __init__(self, sizes: Sizes, tokens: int, device: torch.device) -> None:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self.x, self.residual, self.weight = randn(tokens, sizes.hidden), randn(tokens, sizes.hidden), randn(sizes.hidden)
        self.gate_up = randn(tokens, 2 * sizes.intermediate)
        self.q, self.k = randn(tokens, sizes.heads, sizes.head), randn(tokens, sizes.kv_heads, sizes.head)
        angles = torch.rand(tokens, sizes.head // 2, device=device).repeat(1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def calls(self, kernels: Kernels) -> dict[str, Call]:
        """Each operation, with the back end's own tables."""
        tables = kernels.rotary_tables(self.cos, self.sin)
        return {
            "rms_norm": lambda: kernels.rms_norm(self.x, self.weight, 1e-6),
            # It may write over its arguments, which only makes their values drift.
            "add_rms_norm": lambda: kernels.add_rms_norm(self.x, self.residual, self.weight, 1e-6),
            "silu_and_mul": lambda: kernels.silu_and_mul(self.gate_up),
            "rotate": lambda: kernels.rotate(self.q, self.k, tables, False),
        }

    def nbytes(self, op: str) -> int:
        """What the operation has to read and to write."""
        heads = self.q.nbytes + self.k.nbytes
        moved = {"rms_norm": 2 * self.x.nbytes, "add_rms_norm": 4 * self.x.nbytes, "silu_and_mul": 3 * self.gate_up.nbytes // 2}
        return moved.get(op, 2 * heads)


def needs(sizes: Sizes) -> tuple[KernelNeed, ...]:
    """What a layer of these sizes declares."""
    norms = (NormNeed(op, torch.bfloat16, sizes.hidden) for op in ("rms_norm", "add_rms_norm"))
    gate = GateNeed("silu_and_mul", torch.bfloat16, sizes.intermediate)
    return (*norms, gate, RotaryNeed("rotate", torch.bfloat16, sizes.head, sizes.head, False))


def backends(sizes: Sizes, device: torch.device) -> dict[str, Kernels]:
    """Torch, and flashinfer where all of it can be had here, compiled."""
    wanted, facts = needs(sizes), device_facts(device)
    found = {symbol: resolve_symbol(symbol) for symbol in FLASHINFER.symbols(wanted)} if facts.type == "cuda" else {}
    lacking = [lack.detail for need in wanted for lack in find_unsupported(FLASHINFER, need, found, facts)]
    if lacking or facts.cuda is None:
        print(f"torch alone: {lacking[0] if lacking else 'no CUDA'}")
        return {"torch": TORCH}
    modules = tuple(dict.fromkeys(module for need in wanted for module in FLASHINFER.functions[need.op].modules(need)))
    Compilation(modules, facts.cuda).result(10, print, lambda: None)
    return {"torch": TORCH, "flashinfer": FLASHINFER.kernels([need.op for need in wanted])["rms_norm"]}


def recorded(call: Call) -> Call:
    """The call as a CUDA graph of ten of them: one replay is far longer than its launch."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_RECORDED):
            call()
    return graph.replay


def seconds(call: Call, device: torch.device) -> float:
    """Of one call, over as many as fill a turn."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    count, spent = 1, 0.0
    while True:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            call()
        wait()
        spent = time.perf_counter() - began
        if spent >= TURN_SECONDS:
            return spent / count
        count = max(count * 2, int(count * TURN_SECONDS / max(spent, 1e-9)))


@dataclass(frozen=True)
class Row:
    """Microseconds, and 10**9 bytes a second, by back end."""

    op: str
    tokens: int
    microseconds: dict[str, float]
    gb_per_s: dict[str, float]


def measure(sizes: Sizes, device: torch.device, graph: bool) -> list[Row]:
    """A row for each operation and number of tokens."""
    found = backends(sizes, device)
    rows = []
    for tokens in sizes.tokens:
        tensors = Tensors(sizes, tokens, device)
        each = {name: tensors.calls(kernels) for name, kernels in found.items()}
        for op in each["torch"]:
            ready = {name: recorded(calls[op]) if graph else calls[op] for name, calls in each.items()}
            turns = [{name: seconds(call, device) for name, call in ready.items()} for _ in range(TURNS)]
            share = _RECORDED if graph else 1
            micro = {name: statistics.median(turn[name] for turn in turns) / share * 1e6 for name in ready}
            rows.append(Row(op, tokens, micro, {name: tensors.nbytes(op) / 1e3 / spent for name, spent in micro.items()}))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--graph", action="store_true", help="calls recorded in CUDA graphs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with torch.inference_mode():
        rows = measure(QUICK if args.quick else WHOLE, device, args.graph and device.type == "cuda")
    if args.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    table = Table(title=f"bfloat16 on {name}, torch {torch.__version__}, median of {TURNS} turns")
    for column in ("operation", "tokens", "back end", "microseconds", "GB/s", "times torch"):
        table.add_column(column, justify="left" if column in ("operation", "back end") else "right")
    for row in rows:
        for backend, spent in row.microseconds.items():
            ratio = row.microseconds["torch"] / spent
            table.add_row(row.op, str(row.tokens), backend, f"{spent:.1f}", f"{row.gb_per_s[backend]:.0f}", f"{ratio:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
