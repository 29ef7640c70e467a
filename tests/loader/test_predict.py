"""What a plan says that each transport takes is what the transport that is chosen takes, and what is on its way stays within it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, load_model
from rtp_llm.loader.budget.budget import predictions
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.fill import fill as filling
from rtp_llm.loader.fill.derive import DerivingPlacement
from rtp_llm.loader.prepare import prepare
from rtp_llm.plan.derived import DerivedTensor
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

#: Small chunks, so that tensors come in several parts and several chunks are on the device.
CHUNKS = json.dumps({"parallel": {"use_pipeline": True, "queue_size": 0, "max_batch_bytes": 256 << 10}})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """3 MB in five files."""
    folder = tmp_path_factory.mktemp("predict") / "llama"
    sizes = {"hidden_size": 128, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    return str(save_tiny_llama(folder, dtype=torch.bfloat16, shard="500KB", num_key_value_heads=2, **sizes))


def settings(method: str, quantization: str | None) -> LoadConfig:
    return LoadConfig(device="cpu", load_method=method, quantization=quantization, fastsafetensors_config_json=CHUNKS, timeout_s=60)


def said(path: str, quantization: str | None, place: ParallelConfig) -> dict[str, dict[str, int]]:
    """What a plan says for each transport."""
    context = planning_context(path, place, settings("scratch", quantization))
    return {budget.transport: budget.to_json() for budget in predictions(context, prepare(context))}


def taken(path: str, method: str, quantization: str | None) -> tuple[dict[str, int], int, int]:
    """A load's own prediction, the most of tensors that really were on their way, and how many at a time."""
    most = count = 0

    class Recording(DerivingPlacement):
        def _allocated(self, derived: DerivedTensor, dtype: torch.dtype, room: int) -> Any:
            nonlocal most, count
            found = super()._allocated(derived, dtype, room)
            held = [*self._gathered.values(), found]
            most, count = max(most, sum(g.content.nbytes for g in held)), max(count, len(held))
            return found

    filling.DerivingPlacement = Recording  # type: ignore[misc]  # this process ends after the load, or undoes it
    try:
        report = load_model(path, load=settings(method, quantization)).report
    finally:
        filling.DerivingPlacement = DerivingPlacement  # type: ignore[misc]
    assert report.effective_mode == method
    return report.budget.to_json(), most, count


@pytest.mark.parametrize("quantization", [None, "inline-fp8-tensor", "inline-fp8-block"])
@pytest.mark.parametrize("method", ["scratch", "fastsafetensors"])
def test_alone(checkpoint: str, method: str, quantization: str | None) -> None:
    """One rank, by both transports, plain and with FP8 made on the way."""
    memory, most, _ = taken(checkpoint, method, quantization)
    assert memory == said(checkpoint, quantization, ParallelConfig())[method]
    assert 0 <= most <= memory["bytes_making"] and bool(most) == (quantization is not None)
    assert method == "scratch" or memory["bytes_staging"] <= 2 * (256 << 10)


def test_a_group(checkpoint: str) -> None:
    """Ranks that read two files side by side have two tensors begun at a time; the prediction knows."""
    world = 2
    results = run_ranks(world, taken, checkpoint, "fastsafetensors", "inline-fp8-tensor", timeout=120)
    for rank, result in enumerate(results):
        memory, most, count = result.value
        place = ParallelConfig(tp_size=world, tp_rank=rank)
        assert memory == said(checkpoint, "inline-fp8-tensor", place)["fastsafetensors"]
        assert 0 < most <= memory["bytes_making"] and count > 1


def test_no_chunks_of_other_files(tmp_path: Path, checkpoint: str) -> None:
    """A torch file is no safetensors, and has one way only."""
    from safetensors.torch import load_file

    merged = {name: tensor for file in sorted(Path(checkpoint).glob("*.safetensors")) for name, tensor in load_file(file).items()}
    torch.save(merged, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((Path(checkpoint) / "config.json").read_text())
    assert set(said(str(tmp_path), None, ParallelConfig())) == {"scratch"}
