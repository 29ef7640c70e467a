"""Several GPUs over NCCL: ranks compute what one GPU computes, by either transport, and fail together.

Tagged ``multi_gpu``: ``make pytest ARGS="-m multi_gpu tests/gpu"`` on a machine with two GPUs.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import RtpLlmError
from tests.models.latents import save as save_latent
from tests.models.reference import distance, token_ids
from tests.moe.rank_worker import Shape, logits
from tests.moe.variants import make as make_variant
from tests.quantization.formats import FORMATS
from tests.quantization.formats import make as make_format
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


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-ue8m0", "fp8-static"])
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_fp8_and_its_scales_cross_nccl(name: str, model: str, tmp_path: Path) -> None:
    """Dtypes that NCCL refuses (``float8_e8m0fnu``, in part ``float8_e4m3fn``) are broadcast as the bytes they are."""
    make_format(FORMATS[name], model, tmp_path)
    settings = LoadConfig(device="cuda", dtype="float32", load_method="fastsafetensors", verify=True, timeout_s=60)
    for mode, verified in (result.value for result in run_ranks(2, verified_load, str(tmp_path), settings, Shape(2, 1), timeout=120)):
        assert mode == "fastsafetensors" and verified


@pytest.mark.parametrize("stacked_moe_mode", ["per-expert", "full-stacked"])
@pytest.mark.parametrize("shape", [Shape(2, 1), Shape(1, 2)])
def test_stacked_experts_cross_nccl(stacked_moe_mode: str, shape: Shape, tmp_path: Path) -> None:
    """Each expert by itself, and stacks whole: every rank holds exactly its experts, or its shards of them."""
    make_variant("qwen3_moe", tmp_path, published=False)
    settings = LoadConfig(device="cuda", load_method="fastsafetensors", stacked_moe_mode=stacked_moe_mode, verify=True, timeout_s=60)
    for mode, verified in (result.value for result in run_ranks(2, verified_load, str(tmp_path), settings, shape, timeout=120)):
        assert mode == "fastsafetensors" and verified


def verified_load(path: str, settings: LoadConfig, shape: Shape) -> tuple[str, int | None]:
    """One rank's load, each place compared with a second reader's bytes."""
    report = load_model(path, parallel=shape.place(), load=settings).report
    return report.effective_mode, report.verified


@pytest.mark.parametrize("save", [partial(make_variant, "qwen3_moe"), partial(save_latent, "v3")], ids=["qwen3_moe", "deepseek_v3"])
def test_tensor_and_expert_parallel_together(save: Callable[[Path], object], tmp_path: Path) -> None:
    """TP 2 x EP 2: four GPUs over NCCL where there are four; on two each is shared by two ranks, which speak gloo."""
    save(tmp_path)
    jobs, tokens = [(str(tmp_path), Shape(2, 2))], token_ids()
    with torch.inference_mode():
        alone = load_model(tmp_path, device="cuda").model(tokens.cuda()).cpu()
    first, *others = (result.value[0][0] for result in run_ranks(4, logits, jobs, tokens, [24], "cuda", timeout=180))
    assert distance(first, alone) < 1e-3
    assert all(torch.equal(first, other) for other in others)


def load_or_say(path: str, way: str) -> None:
    """A load on which rank 1 comes to grief."""
    from rtp_llm.transport.scratch.files import Files

    if os.environ["RANK"] == "1" and way == "short of memory":
        torch.cuda.set_device(1)
        free, _ = torch.cuda.mem_get_info(1)
        hoard = torch.empty(free - LEFT_FREE, dtype=torch.uint8, device="cuda:1")
        assert hoard.is_cuda
    if os.environ["RANK"] == "1" and way == "killed":
        Files.scatter = lambda *args: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
    try:
        load_model(path, load=LoadConfig(device="cuda", load_method="scratch", timeout_s=600))
    except RtpLlmError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def test_a_rank_that_is_short_of_memory(checkpoint: str) -> None:
    """Only rank 1's GPU is full: both refuse before they allocate, with the same message, which names that GPU."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, load_or_say, checkpoint, "short of memory", timeout=120)
    for result in caught.value.results:
        assert result.returncode == 2, str(result)
        assert "OUT_OF_MEMORY" in result.stderr and "cuda:1" in result.stderr, str(result)


def test_a_rank_that_is_killed(checkpoint: str) -> None:
    """Rank 1 is killed at its first read: rank 0 ends, long before the time-out, and says who was lost."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, load_or_say, checkpoint, "killed", timeout=120)
    result = caught.value.results[0]
    assert result.returncode == 2 and "RANK_LOST" in result.stderr and "rank 1" in result.stderr, str(result)
