"""Two and four real ranks over gloo compute what one computes, each from the bytes of its own experts."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch

from rtp_llm import ParallelConfig, build_plan, load_model
from rtp_llm.checkpoint import TensorInfo, read_catalog
from tests.models.reference import distance, token_ids
from tests.moe.rank_worker import Shape, counted, logits
from tests.moe.variants import VARIANTS, make
from tests.support.ranks import run_ranks

STEPS = [15, 1, 8]

#: Ten physical experts: 0 on both ranks, 2 twice on the first.
PHYSICAL = [0, 1, 2, 2, 3, 4, 5, 6, 0, 3]


def replicated(variant: str) -> list[int]:
    """A table of ten or twelve physical experts in which some logical ones have two or three copies."""
    count = expert_count(variant)
    row = [*range(count), 0, 2, 2, 1, 3, 0, 1, 2]
    return row[: 12 if count > 4 else 8]


def expert_count(variant: str) -> int:
    options = VARIANTS[variant][1]
    return int(next(options[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in options))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_computes(size: int, tmp_path: Path) -> None:
    """TP 2, EP 2, EP 4, TP 2 x EP 2, and EPLB with copies of experts (on several ranks and twice on one): logits differ by less
    than 1e-4 from one rank's, and are the same on all ranks to the last bit."""
    ids, jobs = token_ids(), []
    for variant in VARIANTS:
        folder = tmp_path / variant
        make(variant, folder, published=variant.endswith("e") or variant == "mixtral")
        table = tmp_path / f"{variant}.json"
        table.write_text(json.dumps({"phy2log": replicated(variant)}))
        shapes = {2: [Shape(2, 1), Shape(1, 2), Shape(1, 2, str(table))], 4: [Shape(1, 4), Shape(2, 2), Shape(2, 2, str(table))]}
        jobs += [(str(folder), shape) for shape in shapes[size]]

    results = run_ranks(size, logits, jobs, ids, STEPS, timeout=180)

    for job, *ranks in zip(jobs, *(result.value for result in results), strict=True):
        folder, shape = job
        with torch.inference_mode():
            alone = load_model(folder, device="cpu").model(ids)
        for whole, stepped in ranks:
            assert distance(whole, alone) < 1e-4, job
            assert distance(stepped, alone) < 1e-4, job
            assert torch.equal(whole, ranks[0][0]), job


def is_expert(tensor: TensorInfo) -> bool:
    return ".experts." in tensor.name


@pytest.mark.parametrize("published", [True, False], ids=["published", "stacked"])
@pytest.mark.parametrize("ranks", [2, 4, 7])
def test_a_rank_reads_the_bytes_of_its_experts(ranks: int, published: bool, tmp_path: Path) -> None:
    """Seven experts over two, four and seven ranks, computed by hand: a rank reads its experts' bytes (within 1.02), and all
    that is not an expert.  The remainder goes to the low ranks."""
    make("qwen3_moe", tmp_path, published=published)
    tensors = read_catalog(tmp_path).tensors
    experts = sum(t.nbytes for t in tensors if is_expert(t))
    rest = sum(t.nbytes for t in tensors if not is_expert(t))
    assert experts == 2 * 7 * 3 * prod((24, 32)) * 4
    held = {2: [4, 3], 4: [2, 2, 2, 1], 7: [1] * 7}[ranks]
    for rank, count in enumerate(held):
        share = experts * count // 7
        plan = build_plan(tmp_path, ParallelConfig(ep_size=ranks, ep_rank=rank))
        assert not plan.problems
        assert share <= plan.bytes_read - rest <= 1.02 * share
        assert plan.bytes_resident == plan.bytes_read


@pytest.mark.parametrize("read_gap_kib", [0, 128])
def test_processes_read_the_bytes_of_their_experts(tmp_path: Path, read_gap_kib: int) -> None:
    """Counted at the system call, in four real processes: what a rank reads is what it planned, within 1.02: over EP always;
    with TP inside an expert where gaps are not read past, and else no more than its group's experts."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 160, "num_experts": 8, "num_hidden_layers": 2}
    jobs = []
    for published in (True, False):
        folder = tmp_path / str(published)
        make("qwen3_moe", folder, published=published, **sizes)
        (tmp_path / "eplb.json").write_text('{"phy2log": [7, 1, 2, 2, 3, 4, 5, 6, 0, 3, 1, 0]}')
        jobs += [(str(folder), shape) for shape in (Shape(1, 4), Shape(2, 2), Shape(1, 4, str(tmp_path / "eplb.json")))]
    results = run_ranks(4, counted, jobs, read_gap_kib, timeout=120)
    for (folder, shape), *ranks in zip(jobs, *(result.value for result in results), strict=True):
        tensors = read_catalog(folder).tensors
        experts = sum(t.nbytes for t in tensors if is_expert(t))
        rest = sum(t.nbytes for t in tensors if not is_expert(t))
        assert experts > 4 * rest
        for planned, read in ranks:
            exact = shape.tp_size == 1 or not read_gap_kib
            assert planned <= read <= 1.02 * (planned if exact else rest + experts // shape.ep_size), (folder, shape)


def test_copies_are_read_once(tmp_path: Path) -> None:
    """An expert that stands twice on a rank takes the room of two and is read as one."""
    make("qwen3_moe", tmp_path / "model")
    (tmp_path / "eplb.json").write_text(json.dumps({"phy2log": PHYSICAL}))
    one = 2 * 3 * prod((24, 32)) * 4
    plain, copied = (
        build_plan(tmp_path / "model", ParallelConfig(ep_size=size, eplb=table))
        for size, table in ((7, None), (2, str(tmp_path / "eplb.json")))
    )
    assert copied.bytes_read - plain.bytes_read == 3 * one  # 0, 1, 2 and 3, where rank 0 of seven has 0 alone
    assert copied.bytes_resident - plain.bytes_resident == 4 * one
