"""Decoding: our back ends with and without CUDA graphs, against transformers with a static cache.

python benchmark/decode.py                     a Llama of 8B in bfloat16; batches of 1, 8 and 64; three turns; the first GPU
python benchmark/decode.py --gb 16 --turns 5 --json
python benchmark/decode.py --batches 1 --only transformers "flashinfer, graphs" --turns 1    a part, where time is short
python benchmark/decode.py --quick             a small model, short answers, one turn; on the CPU too

A contender and turn is a fresh process, which decodes each batch once unmeasured and once measured.  Rates are new tokens a second
of all sequences together, prompts not counted.  A ratio is that to transformers in the same turn; medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

#: The oracle's name: the others are compared with it.
REFERENCE = "transformers"
#: name: kernels, graphs.
OURS = {
    "torch": ("torch", False),
    "torch, graphs": ("torch", True),
    "flashinfer": ("flashinfer", False),
    "flashinfer, graphs": ("flashinfer", True),
}
#: Longest time of one process: flashinfer's first compilation, transformers' compilation for each batch.
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Sizes:
    """``prompt`` tokens of each sequence, and ``new`` ones."""

    batches: tuple[int, ...]
    prompt: int
    new: int

    def prompts(self, batch: int, vocabulary: int) -> list[list[int]]:
        import torch

        return torch.randint(vocabulary, (batch, self.prompt), generator=torch.Generator().manual_seed(batch)).tolist()  # type: ignore[no-any-return]


def by_transformers(directory: str, sizes: Sizes, device: str) -> dict[int, float]:
    """Tokens a second by batch: what an answer takes beyond its first token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).to(device)

    def seconds(ids: torch.Tensor, new: int) -> float:
        began = time.perf_counter()
        how = {"do_sample": False, "cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
        model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=new, max_new_tokens=new, **how)[0, -1].item()
        return time.perf_counter() - began

    rates = {}
    for batch in sizes.batches:
        ids = torch.tensor(sizes.prompts(batch, model.config.vocab_size), device=device)
        for new in (1, sizes.new):
            seconds(ids, new)
        rates[batch] = batch * (sizes.new - 1) / (seconds(ids, sizes.new) - seconds(ids, 1))
    return rates


def by_us(directory: str, sizes: Sizes, device: str, kernels: str, graphs: bool) -> dict[int, float]:
    """Tokens a second by batch."""
    from rtp_llm import LoadConfig, load_model
    from rtp_llm.runtime.generation import Generation, GenerationRequest, cache_size
    from rtp_llm.runtime.graphs import decoding

    loaded = load_model(directory, load=LoadConfig(device=device, kernels=kernels, load_method="scratch", progress=False))
    model: Any = loaded.model
    rates = {}
    for batch in sizes.batches:
        requests = [GenerationRequest(tuple(prompt), sizes.new) for prompt in sizes.prompts(batch, loaded.raw_config["vocab_size"])]
        cache = model.cache_of(cache_size(requests, batch))
        way = decoding(model, cache, graphs=graphs)
        if graphs and not way.sizes:
            raise SystemExit(f"no graphs: {way.reason}")
        for _ in range(2):
            generation = Generation(model, requests, cache, decoder=way.decoder)
            for _ in generation.events():
                pass
        rates[batch] = generation.decode.per_second or 0.0
        del cache, way, generation
    return rates


def one(directory: str, name: str, device: str, sizes: Sizes) -> None:
    """Measures one contender in this process."""
    import torch
    import transformers

    rates = by_transformers(directory, sizes, device) if name == REFERENCE else by_us(directory, sizes, device, *OURS[name])
    machine = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(json.dumps({"rates": rates, "machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}))


def measured(directory: Path, name: str, device: str, sizes: Sizes) -> dict[str, Any]:
    """What a fresh process says, or why it could not."""
    plan = json.dumps([list(sizes.batches), sizes.prompt, sizes.new])
    command = [sys.executable, __file__, "--one", str(directory), name, device, plan]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"nothing for {TIMEOUT_S} s"}
    if done.returncode:
        return {"failed": (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1][:200]}
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def rows(turns: Sequence[dict[str, dict[str, Any]]], names: Sequence[str], batches: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each batch and contender: median rate, its range, and the median ratio to the reference of the same turn."""
    found = []
    for batch in batches:
        for name in names:
            failed = next((turn[name]["failed"] for turn in turns if "failed" in turn[name]), None)
            row: dict[str, Any] = {"batch": batch, "name": name, "failed": failed}
            if failed is None:
                rates = [turn[name]["rates"][str(batch)] for turn in turns]
                row |= {"tokens_per_s": statistics.median(rates), "range": [min(rates), max(rates)], "ratio": None}
                if all("rates" in turn.get(REFERENCE, {}) for turn in turns):
                    row["ratio"] = statistics.median(
                        turn[name]["rates"][str(batch)] / turn[REFERENCE]["rates"][str(batch)] for turn in turns
                    )
            found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small, short, one turn")
    parser.add_argument("--gb", type=float, default=16.0, help="size of the model in 10**9 bytes of bfloat16")
    parser.add_argument("--turns", type=int, help="3 unless given; 1 with --quick")
    parser.add_argument("--batches", type=int, nargs="+", help="sequences at a time; 1, 8 and 64 unless given")
    parser.add_argument("--only", nargs="+", choices=[REFERENCE, *OURS], metavar="NAME", help="these contenders; all unless given")
    parser.add_argument("--dir", help="where the checkpoint is written; a temporary directory otherwise")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("DIR", "NAME", "DEVICE", "PLAN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        directory, name, device, plan = args.one
        batches, prompt, new = json.loads(plan)
        one(directory, name, device, Sizes(tuple(batches), prompt, new))
        return

    import torch

    from rtp_llm.bench.synthetic import llama, write_checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    gb, turns = (0.05, args.turns or 1) if args.quick else (args.gb, args.turns or 3)
    sizes = Sizes((1, 8), 16, 33) if args.quick else Sizes((1, 8, 64), 128, 257)
    if args.batches:
        sizes = replace(sizes, batches=tuple(args.batches))
    names = [REFERENCE, *(name for name, (kernels, graphs) in OURS.items() if device == "cuda" or (kernels, graphs) == ("torch", False))]
    names = [name for name in names if not args.only or name in args.only]
    if not names:
        parser.error(f"on {device} there is none of {', '.join(args.only)}")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="decode-") as folder:
        directory = Path(folder, "model")
        write_checkpoint(directory, llama(gb))
        told = [{name: measured(directory, name, device, sizes) for name in names} for _ in range(turns)]
    found = rows(told, names, sizes.batches)
    if args.json:
        print(json.dumps(found))
        return
    about = next((said for said in told[0].values() if "machine" in said), {"machine": device, "torch": "?", "transformers": "?"})
    title = (
        f"{gb} GB of bfloat16 on {about['machine']}, torch {about['torch']}, transformers {about['transformers']}; "
        f"prompts of {sizes.prompt}, {sizes.new} new tokens, {turns} turn(s)"
    )
    table = Table(title=title)
    for column in ("batch", "contender", "tokens/s", "range", "of transformers"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for row in found:
        if row["failed"] is not None:
            table.add_row(str(row["batch"]), row["name"], "failed", row["failed"], "")
            continue
        low, high = row["range"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        table.add_row(str(row["batch"]), row["name"], f"{row['tokens_per_s']:.1f}", f"{low:.1f} - {high:.1f}", ratio)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
