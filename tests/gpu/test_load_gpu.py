"""The same contracts on one GPU: straight to the device, cast there, bounded memory, equal outputs, ranks sharing a GPU.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB in several shards, so that parts, buffers and streams come into play."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 16001, "num_attention_heads": 12}
    return save_tiny_llama(tmp_path_factory.mktemp("gpu") / "llama", shard="40MB", num_key_value_heads=2, **sizes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("buffer_mib", [1, 16])
def test_bits_on_the_device(checkpoint: Path, dtype: str, buffer_mib: int) -> None:
    """As it stands and cast on the device, with buffers smaller and larger than a tensor: equal to a second reader's bits."""
    loaded = load_model(checkpoint, load=LoadConfig(device="cuda", dtype=dtype, verify=True, buffer_mib=buffer_mib))
    assert loaded.report.verified and loaded.report.device == "cuda:0"
    assert all(p.is_cuda for p in loaded.model.parameters())


def test_device_memory(checkpoint: Path) -> None:
    """Without a cast the device's peak is the weights, each rounded up by torch's allocator, which does not split off less than 1 MiB."""
    report = load_model(checkpoint, load=LoadConfig(device="cuda")).report
    assert report.measured_peak_bytes is not None
    assert (
        report.plan.bytes_resident <= report.measured_peak_bytes <= report.plan.bytes_resident + (1 << 20) * len(report.plan.model.params)
    )


def test_logits(checkpoint: Path) -> None:
    """float32 logits on the GPU equal those of transformers on the same GPU."""
    from transformers import AutoModelForCausalLM

    ids = torch.arange(40, device="cuda")[None] * 7 % 16001
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).cuda()
    loaded = load_model(checkpoint, load=LoadConfig(device="cuda"))
    with torch.no_grad():
        assert (loaded.model(ids) - reference(ids).logits).abs().max() < 1e-4


def logits_on_shared_gpu(path: str) -> torch.Tensor:
    loaded = load_model(path, load=LoadConfig(device="cuda", timeout_s=60))
    with torch.no_grad():
        return loaded.model(torch.arange(40, device="cuda")[None] * 7 % 16001).cpu()


def test_two_ranks_on_one_gpu(checkpoint: Path) -> None:
    """Two processes share the only GPU (gloo, since NCCL refuses that): outputs equal to one rank's."""
    with torch.no_grad():
        alone = logits_on_shared_gpu(str(checkpoint))
    for result in run_ranks(
        2, logits_on_shared_gpu, str(checkpoint), timeout=120, env={"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
    ):
        assert (result.value - alone).abs().max() < 1e-4
