"""Planning at the size of published models, from sparse files with real headers."""

from __future__ import annotations

import time
from pathlib import Path

from rtp_llm import LoadConfig, ParallelConfig, build_plan
from tests.support.sparse import LLAMA_3_70B_CONFIG, llama_3_70b, write_sparse_checkpoint


def test_llama_3_70b_is_planned_in_a_second_at_tp_8(tmp_path: Path) -> None:
    """Catalogue, model and plan of one rank of eight: under 1 s of processor time, and complete."""
    write_sparse_checkpoint(tmp_path, llama_3_70b(), 30, LLAMA_3_70B_CONFIG)
    place, settings = ParallelConfig(tp_size=8, tp_rank=5), LoadConfig(device="cpu")
    build_plan(tmp_path, place, settings)  # imports of the family are not the plan's
    began = time.process_time()
    plan = build_plan(tmp_path, place, settings)
    seconds = time.process_time() - began
    plan.raise_for_problems()
    assert len(plan.deliveries) == 723 and plan.bytes_read < plan.bytes_resident * 1.01
    assert seconds < 1, seconds
