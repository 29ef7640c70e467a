"""Experts on GPUs: the grouped product's kernels, and expert parallelism over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import ParallelConfig, load_model
from rtp_llm.layers import moe
from tests.models.reference import closeness, distance, token_ids
from tests.moe.rank_worker import Shape, logits
from tests.moe.variants import VARIANTS, make
from tests.support.ranks import run_ranks

STEPS = [15, 1, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_grouped_product_is_that_of_single_products(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of rows, empty ones among them and rows of no run behind: torch's kernel and one product a run agree."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*s, generator=generator).to("cuda", dtype) for s in ((300, 64), (5, 96, 64)))
    ends = torch.tensor([100, 100, 180, 181, 260], dtype=torch.int32, device="cuda")
    grouped = moe.grouped_linear(x, weight, ends)[:260]
    monkeypatch.setattr(moe, "_grouped_mm", None)
    single = moe.grouped_linear(x, weight, ends)[:260]
    assert (grouped.float() - single.float()).abs().max() < (1e-3 if dtype == torch.float32 else 0.3)
    assert closeness(grouped, single) > 0.9999


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gpu_computes_what_the_cpu_computes(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Logits of every family, and with a cache."""
    make(variant, tmp_path, dtype=dtype)
    ids = token_ids()
    on_cpu, on_gpu = (load_model(tmp_path, device=device).model for device in ("cpu", "cuda"))
    with torch.inference_mode():
        wanted = on_cpu(ids)
        cache = on_gpu.new_cache(len(ids), ids.shape[1])
        stepped = torch.cat([on_gpu(part.cuda(), cache) for part in ids.split(STEPS, dim=1)], dim=1).cpu()
        found = on_gpu(ids.cuda()).cpu()
    if dtype == torch.float32:
        assert distance(found, wanted) < 1e-3 and distance(stepped, wanted) < 1e-3
    else:
        # Rounding may send a token or two to another expert; the others point where they should.
        cosines = torch.cosine_similarity(found.float(), wanted.float(), dim=-1).flatten()
        assert cosines.quantile(0.1) > 0.999


def on_gpu(jobs: list[tuple[str, Shape]], ids: torch.Tensor, steps: list[int]) -> list[torch.Tensor]:
    """What each rank does: logits of each checkpoint, on its own GPU."""
    return [whole for whole, *_ in logits(jobs, ids, steps, device="cuda")]


@pytest.mark.multi_gpu
def test_expert_parallel_over_nccl(tmp_path: Path) -> None:
    """Two GPUs: TP 2 and EP 2, of every family, give one GPU's logits, the same on both to the last bit."""
    ids, jobs = token_ids(), []
    for variant in VARIANTS:
        make(variant, tmp_path / variant)
        jobs += [(str(tmp_path / variant), shape) for shape in (Shape(2, 1), Shape(1, 2))]
    results = run_ranks(2, on_gpu, jobs, ids, STEPS, timeout=240)
    for (folder, shape), *ranks in zip(jobs, *(result.value for result in results), strict=True):
        model = load_model(folder, device="cuda", parallel=ParallelConfig()).model
        with torch.inference_mode():
            alone = model(ids.cuda()).cpu()
        assert torch.equal(ranks[0], ranks[1]), (folder, shape)
        assert distance(ranks[0], alone) < 1e-3, (folder, shape)
