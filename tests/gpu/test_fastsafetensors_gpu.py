"""fastsafetensors on one GPU: right bits from chunks of any size, bounded memory, nothing left, ranks that share the device.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama
from tests.transport.fastsafetensors import workers

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB in several shards, so that chunks, messages and streams come into play."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 16001, "num_attention_heads": 12}
    return save_tiny_llama(tmp_path_factory.mktemp("gpu") / "llama", shard="40MB", num_key_value_heads=2, **sizes)


def settings(mib: int, queue_size: int = 0, dtype: str = "auto") -> LoadConfig:
    parallel = {"use_pipeline": True, "queue_size": queue_size, "max_batch_bytes": mib << 20}
    text = json.dumps({"parallel": parallel})
    return LoadConfig(device="cuda", load_method="fastsafetensors", verify=True, dtype=dtype, fastsafetensors_config_json=text)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mib", [1, 16, 256])
def test_bits_on_the_device(checkpoint: Path, dtype: str, mib: int) -> None:
    """As it stands and cast, from chunks smaller and larger than a tensor: equal to a second reader's bits; nothing is left."""
    import fastsafetensors

    report = load_model(checkpoint, load=settings(mib, dtype=dtype)).report
    assert (report.effective_mode, report.slow_path_weights) == ("fastsafetensors", 0) and report.verified
    assert fastsafetensors.live_allocation_count() == 0


@pytest.mark.parametrize("queue_size", [-1, 0])
def test_device_memory(checkpoint: Path, queue_size: int) -> None:
    """The allocator's peak is within the prediction, and what its rounding adds: up to 2 MiB a parameter or chunk."""
    report = load_model(checkpoint, load=settings(16, queue_size)).report
    assert report.measured_peak_bytes is not None
    blocks = len(report.plan.model.params) + (1 if queue_size < 0 else 2)
    assert report.plan.bytes_resident <= report.measured_peak_bytes <= report.budget.peak + (2 << 20) * blocks


def test_stacked_experts(tmp_path: Path) -> None:
    """Both modes on the device, in two dtypes of the file."""
    for dtype in ("float32", "bfloat16"):
        directory = workers.save_moe(tmp_path / dtype, published=False, dtype=dtype)
        for mode in ("per-expert", "full-stacked"):
            chosen = LoadConfig(device="cuda", load_method="fastsafetensors", verify=True, stacked_moe_mode=mode)
            assert load_model(directory, load=chosen).report.effective_mode == "fastsafetensors"


@pytest.mark.parametrize("method", ["inline-fp8-tensor", "inline-fp8-block"])
def test_fp8_made_of_chunks(checkpoint: Path, method: str) -> None:
    """Codes and scales that are made of what comes in chunks are those that the own reader makes, and the peak is what is predicted."""
    by_reader = load_model(checkpoint, load=LoadConfig(device="cuda", load_method="scratch", dtype="bfloat16", quantization=method))
    wanted = {name: parameter.cpu() for name, parameter in by_reader.model.named_parameters()}
    del by_reader
    loaded = load_model(checkpoint, load=replace(settings(16, dtype="bfloat16"), quantization=method))
    report = loaded.report
    assert report.effective_mode == "fastsafetensors" and report.budget.derived > 0
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter.cpu().reshape(-1).view(torch.uint8), wanted[name].reshape(-1).view(torch.uint8)), name
    assert report.measured_peak_bytes is not None
    assert report.measured_peak_bytes <= report.budget.peak + (2 << 20) * (len(report.plan.model.params) + 3)


def shared(path: str) -> tuple[str, int | None, torch.Tensor]:
    """One of several ranks on one GPU."""
    loaded = load_model(path, load=LoadConfig(device="cuda", load_method="fastsafetensors", verify=True, timeout_s=60))
    with torch.inference_mode():
        logits = loaded.model(torch.arange(40, device="cuda")[None] * 7 % 16001).cpu()
    return loaded.report.effective_mode, loaded.report.verified, logits


def test_two_ranks_on_one_gpu(checkpoint: Path) -> None:
    """Each file is read by one of two processes and broadcast over gloo from and to device memory: bits and logits are right."""
    with torch.inference_mode():
        alone = load_model(checkpoint, load=LoadConfig(device="cuda")).model(torch.arange(40, device="cuda")[None] * 7 % 16001).cpu()
    visible = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    for result in run_ranks(2, shared, str(checkpoint), timeout=120, env=visible):
        mode, verified, logits = result.value
        assert mode == "fastsafetensors" and verified
        assert (logits - alone).abs().max() < 1e-4
