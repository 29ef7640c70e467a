"""DeepSeek-V3 as published: FP8 in blocks, 92,000 tensors in 163 files, planned from headers."""

from __future__ import annotations

import time
from pathlib import Path

from rtp_llm import LoadConfig, ParallelConfig, build_plan
from tests.support.sparse import DEEPSEEK_V3_CONFIG, deepseek_v3, write_sparse_checkpoint


def fp8(rows: int, columns: int) -> int:
    """Bytes of codes and of a float32 scale for each block of 128 x 128."""
    return rows * columns + 4 * -(-rows // 128) * -(-columns // 128)


def by_hand() -> int:
    """Bytes of one rank at TP 8 and EP 64: a share of 16 heads, of 2,304 or 256 intermediate elements, four experts a layer."""
    hidden, heads = 7168, 128 // 8
    attention = fp8(1536, hidden) + fp8(heads * 192, 1536) + fp8(576, hidden) + fp8(heads * 256, 512) + fp8(hidden, heads * 128)
    norms = 2 * (1536 + 512 + 2 * hidden)

    def mlp(size: int) -> int:
        return 2 * fp8(size, hidden) + fp8(hidden, size)

    router = 4 * 256 * (hidden + 1)  # float32, as the reference computes it
    # 129,280 rows of the vocabulary are padded to 253 * 512, so that eight ranks have equal multiples of 64.
    tables = 2 * 2 * (253 * 512 // 8) * hidden
    return 61 * (attention + norms) + 3 * mlp(18432 // 8) + 58 * (router + 5 * mlp(2048 // 8)) + tables + 2 * hidden


def test_planned_with_scales_in_seconds(tmp_path: Path) -> None:
    """Every scale has its place: nothing missing, nothing unexpected, the MTP layer skipped by name; bytes as computed by hand; and
    less than four seconds of processor time, since the machine that runs tests is shared."""
    write_sparse_checkpoint(tmp_path, deepseek_v3(), 163, DEEPSEEK_V3_CONFIG)
    start = time.process_time()
    plan = build_plan(tmp_path, ParallelConfig(tp_size=8, tp_rank=3, ep_size=64, ep_rank=5), LoadConfig(device="cpu"))
    seconds = time.process_time() - start
    assert not plan.problems and not plan.missing and not plan.unexpected
    assert plan.bytes_resident == by_hand()
    assert plan.model.quantization is not None
    assert plan.model.quantization.schemes == (("FP8, a scale for each block of 128 x 128", 61 * 5 + 3 * 3 + 58 * 257 * 3),)
    assert {one.reason for one in plan.skipped} == {"layers for multi-token prediction are not run"}
    assert seconds < 4


def test_shards_that_cut_through_blocks(tmp_path: Path) -> None:
    """At TP 32 an expert's 2,048 elements make shards of 64: two ranks hold the scale of the block that they share, and the parts
    of each scale that ranks hold are equal or disjoint, so that an export finds each once."""
    write_sparse_checkpoint(tmp_path, deepseek_v3(), 163, DEEPSEEK_V3_CONFIG)
    boxes = []
    for rank in (4, 5, 6):
        plan = build_plan(tmp_path, ParallelConfig(tp_size=32, tp_rank=rank, ep_size=64), LoadConfig(device="cpu"))
        assert not plan.problems
        boxes += [d.slot_box for d in plan.deliveries if d.slot == "layers.3.experts.0.gate.weight_scale_inv"]
    assert boxes == [((2, 3), (0, 56)), ((2, 3), (0, 56)), ((3, 4), (0, 56))]
