"""Planning at the size of published models, from sparse files with real headers."""

from __future__ import annotations

from pathlib import Path

from rtp_llm import LoadConfig, ParallelConfig, build_plan
from tests.support.calls import counted
from tests.support.sparse import LLAMA_3_70B_CONFIG, llama_3_70b, write_sparse_checkpoint

#: Calls of Python functions for each tensor of a model with few of them (it has 129; benchmark/plan.md has the time).  Work that grows
#: with the square of the number of tensors has thousands.
MOST_CALLS = 200


def test_llama_3_70b_is_planned_in_few_steps_at_tp_8(tmp_path: Path) -> None:
    """Catalogue, model and plan of one rank of eight: complete, and with no more work for each tensor than is its due."""
    write_sparse_checkpoint(tmp_path, llama_3_70b(), 30, LLAMA_3_70B_CONFIG)
    place, settings = ParallelConfig(tp_size=8, tp_rank=5), LoadConfig(device="cpu")
    build_plan(tmp_path, place, settings)  # imports of the family are not the plan's
    plan, calls = counted(lambda: build_plan(tmp_path, place, settings))
    plan.raise_for_problems()
    assert len(plan.deliveries) == 723 and plan.bytes_read < plan.bytes_resident * 1.01
    assert calls < MOST_CALLS * len(plan.catalog.tensors), calls
