"""Real ranks over gloo: what they compute together is what one computes, and what they write is the source."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from rtp_llm import LoadConfig, ParallelConfig, build_plan, export_checkpoint, load_model
from tests.models.reference import distance, randomise, token_ids
from tests.moe import variants
from tests.quantization.formats import FORMATS, MODELS, make
from tests.support.ranks import run_ranks

#: At TP 2 shards of 160 and 96 cut through blocks of 128; the order of groups needs all scales on each rank; zero points are packed
#: along rows.
JOBS = [
    ("fp8-block", "llama"),
    ("fp8-static", "llama"),
    ("gptq-order", "llama"),
    ("awq", "llama"),
    ("fp8-block", "qwen3_moe"),
    ("gptq", "qwen3_moe"),
]
INLINE = [("inline-fp8-tensor", "llama"), ("inline-fp8-block", "qwen3_moe")]


def work(folders: list[tuple[str, str | None, int]], ids: torch.Tensor) -> list[torch.Tensor]:
    """For each folder, method and whether experts are divided: loads, computes, and exports what can be."""
    rank, found = int(os.environ["RANK"]), []
    for folder, method, experts in folders:
        place = ParallelConfig(ep_size=2, ep_rank=rank) if experts else ParallelConfig(tp_size=2, tp_rank=rank)
        loaded = load_model(folder, parallel=place, load=LoadConfig(device="cpu", dtype="float32", quantization=method, timeout_s=60))
        with torch.inference_mode():
            found.append(loaded.model(ids))
        if method is None:
            export_checkpoint(loaded, f"{folder}-out-{experts}")
    return found


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_two_ranks_compute_what_one_computes_and_write_what_was_read(tmp_path: Path) -> None:
    """TP 2 and, with experts, EP 2: logits as one rank's, equal on both ranks to the last bit; exports equal the source byte for
    byte.  FP8 made while loading has the same codes however many ranks there are, and so the same logits."""
    jobs: list[tuple[str, str | None, int]] = []
    for name, model in JOBS:
        folder = tmp_path / f"{name}-{model}"
        make(FORMATS[name], model, folder)
        jobs += [(str(folder), None, experts) for experts in ((0, 1) if model == "qwen3_moe" else (0,))]
    for method, model in INLINE:
        folder = tmp_path / f"{method}-{model}"
        plain_checkpoint(model, folder)
        jobs += [(str(folder), method, experts) for experts in ((0, 1) if model == "qwen3_moe" else (0,))]
    results = run_ranks(2, work, jobs, token_ids(), timeout=240)
    for (folder, method, experts), first, second in zip(jobs, *(result.value for result in results), strict=True):
        alone = load_model(folder, load=LoadConfig(device="cpu", dtype="float32", quantization=method))
        with torch.inference_mode():
            assert distance(first, alone.model(token_ids())) < 1e-4, folder
        assert torch.equal(first, second), folder
        if method is None:
            assert digest(Path(f"{folder}-out-{experts}")) == digest(Path(folder)), folder


def plain_checkpoint(model: str, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """A plain random model, its routers far apart."""
    model_class, config = MODELS[model]
    made = model_class(config()).eval()
    randomise(made)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(8)
    made.to(dtype).save_pretrained(folder)


def test_ranks_with_unequal_shares_agree(tmp_path: Path) -> None:
    """Seven experts over two ranks: one makes FP8 of four, the other of three, and the plans they compare are the same."""
    variants.make("qwen3_moe", tmp_path)
    load = LoadConfig(device="cpu", quantization="inline-fp8-tensor")
    plans = [build_plan(tmp_path, ParallelConfig(ep_size=2, ep_rank=rank), load) for rank in range(2)]
    assert plans[0].model.quantization != plans[1].model.quantization
    assert plans[0].digest == plans[1].digest
