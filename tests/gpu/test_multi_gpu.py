"""Several GPUs over NCCL: ranks compute what one GPU computes, by either transport, and fail together.

Tagged ``multi_gpu``: ``make pytest ARGS="-m multi_gpu tests/gpu"`` on a machine with two GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import RtpLlmError
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.tiny import save_tiny_llama

pytestmark = pytest.mark.multi_gpu

#: Bytes of a GPU that the rank which is short of memory leaves free: less than the checkpoint needs.
LEFT_FREE = 64 << 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 230 MB in several shards, with KV heads to replicate and a vocabulary to pad."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4, "vocab_size": 16001, "num_attention_heads": 12}
    return str(save_tiny_llama(tmp_path_factory.mktemp("gpus") / "llama", shard="40MB", num_key_value_heads=1, **sizes))


def ids() -> torch.Tensor:
    return torch.arange(40, device="cuda")[None] * 7 % 16001


def loaded(path: str, settings: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """One rank: its report, and its logits."""
    model = load_model(path, load=LoadConfig(device="cuda", timeout_s=60, **settings))
    with torch.inference_mode():
        return model.report.to_json(), model.model(ids()).cpu()


@pytest.mark.parametrize("method", ["scratch", "fastsafetensors"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_gpus_compute_what_one_computes(checkpoint: str, method: str, dtype: str) -> None:
    """Rank-local reads, and files read once and broadcast: every weight verified, logits equal on both and to one GPU's."""
    with torch.inference_mode():
        alone = load_model(checkpoint, load=LoadConfig(device="cuda", dtype=dtype)).model(ids()).cpu()
    settings = {"load_method": method, "verify": True, "dtype": dtype}
    (first, a), (second, b) = [result.value for result in run_ranks(2, loaded, checkpoint, settings, timeout=120)]
    assert [first["effective_mode"], second["effective_mode"]] == [method] * 2
    assert {first["device"], second["device"]} == {"cuda:0", "cuda:1"}
    assert first["verified"] and second["verified"]
    assert torch.equal(a, b)
    if dtype == "float32":
        assert (a - alone).abs().max() < 1e-4
    else:
        assert torch.cosine_similarity(a.float(), alone.float(), dim=-1).min() > 0.999


def load_or_say(path: str, way: str, marks: str) -> None:
    """A load on which rank 1 comes to grief."""
    from rtp_llm.transport.scratch.files import Files

    if os.environ["RANK"] == "1" and way == "short of memory":
        torch.cuda.set_device(1)
        free, _ = torch.cuda.mem_get_info(1)
        hoard = torch.empty(free - LEFT_FREE, dtype=torch.uint8, device="cuda:1")
        assert hoard.is_cuda
    if os.environ["RANK"] == "1" and way == "killed":
        Files.scatter = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        Path(marks, "dies").write_text(str(time.time()))
    try:
        load_model(path, load=LoadConfig(device="cuda", load_method="scratch", timeout_s=60))
    except RtpLlmError as error:
        Path(marks, os.environ["RANK"]).write_text(str(time.time()))
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def test_a_rank_that_is_short_of_memory(checkpoint: str, tmp_path: Path) -> None:
    """Only rank 1's GPU is full: both refuse before they allocate, with the same message, which names that GPU."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, load_or_say, checkpoint, "short of memory", str(tmp_path), timeout=90)
    for result in caught.value.results:
        assert result.returncode == 2, str(result)
        assert "OUT_OF_MEMORY" in result.stderr and "cuda:1" in result.stderr, str(result)


def test_a_rank_that_is_killed(checkpoint: str, tmp_path: Path) -> None:
    """Rank 1 is killed at its first read: rank 0 ends within 10 s and says who was lost."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, load_or_say, checkpoint, "killed", str(tmp_path), timeout=90)
    result = caught.value.results[0]
    assert result.returncode == 2 and "RANK_LOST" in result.stderr and "rank 1" in result.stderr, str(result)
    assert float((tmp_path / "0").read_text()) - float((tmp_path / "dies").read_text()) < 10
