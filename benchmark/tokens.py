"""Greedy answers: how many tokens each back end says like transformers, in each dtype, and what the first other one hangs on.

python benchmark/tokens.py                       SmolLM2 (make models), ten prompts, 128 tokens, the first GPU or the CPU
python benchmark/tokens.py DIR --new 64 --dtypes bfloat16 --json
python benchmark/tokens.py --quick               two prompts, 16 tokens

A prompt is answered by ``transformers.generate`` and by us, alone.  Where answers part, float32 logits behind what both have said
tell how close the two tokens were: ``apart`` is the logit of transformers' token less that of ours.  Steps of bfloat16 between 16
and 32 are 0.125, those of float16 0.016.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

SUBJECTS = ("the sea", "how bread is made", "an old clock", "why it rains and where the rain goes", "x")
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a short story about a lighthouse.",
    "How do I sort a list in Python?",
)
#: What flashinfer has kernels for.
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Parted:
    """How far one answer went along with transformers': ``same`` of ``said`` tokens; ``apart`` where it did not end alike."""

    dtype: str
    backend: str
    prompt: str
    same: int
    said: int
    apart: float | None


def by_transformers(directory: str, prompts: list[list[int]], new: int, dtype: str, device: str) -> list[list[int]]:
    """New tokens of each prompt, end tokens among them."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    model.to(device)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0
        )
        found.append(out[0, len(prompt) :].tolist())
    return found


def by_us(directory: str, prompts: list[list[int]], new: int, dtype: str, device: str, backend: str) -> list[list[int]]:
    """The same by one of our back ends, with CUDA graphs on a GPU."""
    from rtp_llm import LoadConfig, load_model
    from rtp_llm.runtime.generation import Generation, GenerationRequest, cache_size
    from rtp_llm.runtime.graphs import decoding

    model: Any = load_model(directory, load=LoadConfig(device=device, dtype=dtype, kernels=backend, progress=False)).model
    found = []
    for prompt in prompts:
        requests = [GenerationRequest(tuple(prompt), new)]
        cache = model.cache_of(cache_size(requests, 1))
        way = decoding(model, cache, graphs=device == "cuda")
        if device == "cuda" and not way.sizes:
            raise SystemExit(f"no graphs: {way.reason}")
        generation = Generation(model, requests, cache, decoder=way.decoder)
        found += [list(event.answer.ids) for event in generation.events() if event.answer is not None]
    return found


def parted(reference: Any, prompt: list[int], theirs: list[int], ours: list[int]) -> tuple[int, float | None]:
    """The number of equal tokens, and by how much ``reference`` prefers the first other one of theirs."""
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b), None)
    if same is None:
        return len(theirs), None
    ids = torch.tensor([prompt + theirs[:same]], device=next(reference.parameters()).device)
    with torch.inference_mode():
        logits = reference(ids).logits[0, -1]
    return same, float(logits[theirs[same]] - logits[ours[same]])


def compared(directory: str, device: str, dtypes: list[str], new: int, count: int) -> list[Parted]:
    """Every prompt, dtype and back end."""
    from transformers import AutoModelForCausalLM

    from rtp_llm.runtime.tokenizer import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(Path(directory))
    texts = [(f"Here is a long text about {subject}.", True) for subject in SUBJECTS] + [(question, False) for question in QUESTIONS]
    texts = texts[:: max(1, len(texts) // count)][:count]
    prompts = [list(encode_prompt(tokenizer, text, raw=raw)) for text, raw in texts]
    reference: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    reference.to(device)
    backends = ["torch"]
    if device == "cuda" and importlib.util.find_spec("flashinfer") is not None:
        backends.append("flashinfer")
    elif device == "cuda":
        print("flashinfer is not installed, and left out", file=sys.stderr)
    found = []
    for dtype in dtypes:
        theirs = by_transformers(directory, prompts, new, dtype, device)
        for backend in backends if dtype in HALVES else backends[:1]:
            ours = by_us(directory, prompts, new, dtype, device, backend)
            for (text, _), prompt, their, our in zip(texts, prompts, theirs, ours, strict=True):
                same, apart = parted(reference, prompt, their, our)
                found.append(Parted(dtype, backend, text, same, new, apart))
            gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", default=str(Path(__file__).parents[1] / ".cache" / "models" / "smollm2"))
    parser.add_argument("--quick", action="store_true", help="two prompts, 16 tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--dtypes", nargs="+", choices=(*HALVES, "float32"), help="all; on a CPU, where float16 is slow, the other two")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not Path(args.directory).is_dir():
        parser.error(f"there is no {args.directory}; make models fetches SmolLM2")
    if args.quick:
        args.new = 16
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtypes = args.dtypes or [*(HALVES if device == "cuda" else HALVES[:1]), "float32"]
    found = compared(args.directory, device, dtypes, args.new, 2 if args.quick else len(SUBJECTS) + len(QUESTIONS))
    if args.json:
        print(json.dumps([asdict(row) for row in found]))
        return
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    table = Table(title=f"{args.directory} on {where}, torch {torch.__version__}")
    for column in ("dtype", "back end", "prompt", "same", "of", "apart"):
        table.add_column(column, justify="right" if column in ("same", "of", "apart") else "left")
    for row in found:
        apart = "" if row.apart is None else f"{row.apart:+.4f}"
        table.add_row(row.dtype, row.backend, row.prompt, str(row.same), str(row.said), apart)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
