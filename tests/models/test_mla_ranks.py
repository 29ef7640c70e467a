"""Latent attention over real ranks: tensor parallel, expert parallel, both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import ParallelConfig, build_plan, load_model
from rtp_llm.errors import PlanError
from tests.models.latents import save, save_as_held, stored
from tests.models.mla_worker import logits
from tests.models.reference import distance, token_ids
from tests.support.ranks import run_ranks

STEPS = [15, 1, 8]
#: One variant of each family; biases, and heads that are tied, show what is added or gathered once for each rank.
VARIANTS = ["v2-groups", "v3-kimi-k2", "v32", "glm-lite", "kimi-linear-groups"]


@pytest.mark.parametrize(("tp_size", "ep_size"), [(2, 1), (1, 2), (2, 2), (1, 4)])
def test_ranks_compute_what_one_computes(tp_size: int, ep_size: int, tmp_path: Path) -> None:
    """Logits, with a cache and without, differ by less than 1e-4 from one rank's and are the same on all ranks to the last bit;
    and what the ranks export together is the checkpoint, in the published spelling and in that of transformers' memory."""
    folders = [tmp_path / variant for variant in VARIANTS]
    for variant, folder in zip(VARIANTS, folders, strict=True):
        model = save(variant, folder)
    held = tmp_path / "held"
    save_as_held(model, folders[-1], held)
    folders.append(held)
    ids = token_ids()

    results = run_ranks(tp_size * ep_size, logits, list(map(str, folders)), tp_size, ep_size, ids, STEPS, timeout=180)

    for folder in folders:
        model = load_model(folder, device="cpu").model
        with torch.inference_mode():
            alone = model(ids)
        whole, stepped = results[0].value[str(folder)]
        assert distance(whole, alone) < 1e-4, folder.name
        assert distance(stepped, alone) < 1e-4, folder.name
        assert all(torch.equal(whole, other.value[str(folder)][0]) for other in results[1:]), folder.name
        before, after = stored(folder), stored(tmp_path / f"{folder.name}-out")
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items()), folder.name


@pytest.mark.parametrize("variant", ["v3", "v32", "kimi-linear"])
def test_ranks_hold_their_share(variant: str, tmp_path: Path) -> None:
    """Over four ranks what works on heads, experts and the vocabulary is split, what makes latents is whole, and all ranks
    together hold every element of the checkpoint."""
    save(variant, tmp_path)
    alone = build_plan(tmp_path)
    plans = [build_plan(tmp_path, ParallelConfig(tp_size=2, tp_rank=r % 2, ep_size=2, ep_rank=r // 2)) for r in range(4)]
    whole = {spec.name: spec.shape for spec in alone.model.params}
    for plan in plans:
        assert not plan.problems
        assert {spec.name for spec in plan.model.params} == set(whole)
        for spec in plan.model.params:
            part = spec.name.split(".")[-2]
            if part in ("q_a", "kv_a", "q_a_norm", "kv_a_norm", "router", "f_a", "g_a", "o_norm") or ".indexer." in spec.name:
                assert spec.shape == whole[spec.name], spec.name
            elif part in ("q", "kv_b", "o", "qkv", "conv", "f_b", "g_b", "b", "forget", "experts", "gate_up", "down"):
                assert spec.shape != whole[spec.name], spec.name
    held = {(d.slot, d.slot_box) for plan in plans for d in plan.deliveries}
    assert {slot for slot, _ in held} == {d.slot for d in alone.deliveries}
    assert len({plan.model_digest for plan in [alone, *plans]}) == 1


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    """Heads of both kinds of attention, and the intermediate size of experts, at plan time and all at once."""
    save("kimi-linear", tmp_path)
    with pytest.raises(PlanError) as caught:
        build_plan(tmp_path, ParallelConfig(tp_size=16))
    whats = " ".join(problem.what for problem in caught.value.problems)
    for named in ("4 attention heads", "4 linear attention heads", "24 elements of an expert"):
        assert named in whats
