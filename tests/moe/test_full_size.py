"""Plans at full size, from real headers in files without data: DeepSeek-V3 and Kimi-K2, bytes of a rank as computed by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT, child_env
from tests.support.sparse import DEEPSEEK_V3_CONFIG, deepseek_v3, write_sparse_checkpoint

Tensors = dict[str, tuple[str, tuple[int, ...]]]

#: moonshotai/Kimi-K2-Instruct; its architecture is DeepSeek-V3's.
KIMI_K2_CONFIG: dict[str, Any] = {
    **DEEPSEEK_V3_CONFIG,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
    "max_position_embeddings": 131072,
    "rope_theta": 50000.0,
}

#: Bytes of an element; correction biases, and routers in memory, have four.
BF16, F32 = 2, 4


def in_bf16(tensors: Tensors) -> Tensors:
    """The same checkpoint without quantisation: no scales, and no codes."""
    return {name: ("BF16" if d == "F8_E4M3" else d, s) for name, (d, s) in tensors.items() if not name.endswith("_scale_inv")}


def kimi_k2() -> Tensors:
    """Names and shapes of Kimi-K2, in bf16."""
    return dict(_kimi_k2())


def _kimi_k2() -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    c = KIMI_K2_CONFIG
    hidden, heads, q, kv = 7168, 64, 1536, 512
    yield "model.embed_tokens.weight", ("BF16", (c["vocab_size"], hidden))
    for i in range(61):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        shapes: dict[str, tuple[int, ...]] = {
            f"{attn}.q_a_proj": (q, hidden),
            f"{attn}.q_a_layernorm": (q,),
            f"{attn}.q_b_proj": (heads * 192, q),
            f"{attn}.kv_a_proj_with_mqa": (kv + 64, hidden),
            f"{attn}.kv_a_layernorm": (kv,),
            f"{attn}.kv_b_proj": (heads * 256, kv),
            f"{attn}.o_proj": (hidden, heads * 128),
            f"{layer}.input_layernorm": (hidden,),
            f"{layer}.post_attention_layernorm": (hidden,),
        }
        blocks = {f"{layer}.mlp": 18432} if i == 0 else {f"{layer}.mlp.shared_experts": 2048}
        if i:
            blocks |= {f"{layer}.mlp.experts.{e}": 2048 for e in range(384)}
            shapes[f"{layer}.mlp.gate"] = (384, hidden)
            yield f"{layer}.mlp.gate.e_score_correction_bias", ("F32", (384,))
        for block, size in blocks.items():
            shapes |= {f"{block}.gate_proj": (size, hidden), f"{block}.up_proj": (size, hidden), f"{block}.down_proj": (hidden, size)}
        for name, shape in shapes.items():
            yield f"{name}.weight", ("BF16", shape)
    yield "model.norm.weight", ("BF16", (hidden,))
    yield "lm_head.weight", ("BF16", (c["vocab_size"], hidden))


@dataclass(frozen=True)
class Case:
    """A model, its place, and what a rank holds of its parts."""

    config: dict[str, Any]
    tensors: Tensors
    shards: int
    ep_rank: int
    held: int
    skipped: int

    def elements(self) -> tuple[int, int, int, int]:
        """By hand, for tensor-parallel rank 3 of 8: elements in bf16 without the vocabulary, rows of embedding and of head in
        memory and in the file, elements of routers, correction biases."""
        c = self.config
        hidden, heads, layers = 7168, c["num_attention_heads"] // 8, 61
        moe = layers - c["first_k_dense_replace"]
        whole = 1536 * hidden + 1536 + (512 + 64) * hidden + 512 + 2 * hidden  # q_a, its norm, kv_a, its norm, two norms
        split = heads * 192 * 1536 + heads * 256 * 512 + hidden * heads * 128  # q_b, kv_b, o
        dense, expert = 3 * hidden * 18432 // 8, 3 * hidden * 2048 // 8
        body = layers * (whole + split) + (layers - moe) * dense + moe * (1 + self.held) * expert + hidden
        # 129,280 rows are padded to 253 * 512, 163,840 are 320 * 512; rank 3 has no padding.
        rows = {129280: 253 * 64, 163840: 320 * 64}[c["vocab_size"]]
        return body, 2 * rows * hidden, moe * c["n_routed_experts"] * hidden, moe * c["n_routed_experts"]


CASES = {
    # 256 experts over 64 ranks: 4 each.  The layer for multi-token prediction is skipped: 768 + 3 matrices of experts,
    # router and bias, 7 of attention, 2 norms and 6 of its own.
    "deepseek_v3": Case(DEEPSEEK_V3_CONFIG, in_bf16(deepseek_v3()), 163, 63, 4, 3 * 257 + 2 + 7 + 2 + 6),
    # 384 experts over 64 ranks: 6 each.
    "kimi_k2": Case(KIMI_K2_CONFIG, kimi_k2(), 62, 5, 6, 0),
}

#: Calls of Python functions for each tensor, imports included: there are 28 and 26.  Work that grows with the square of the number of
#: tensors has thousands.
MOST_CALLS = 45

_CHILD = """
import json, resource, sys
from rtp_llm import ParallelConfig, build_plan
from tests.support.calls import counted
plan, calls = counted(lambda: build_plan(sys.argv[1], ParallelConfig(8, 3, 64, int(sys.argv[2]))))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
experts = {d.slot for d in plan.deliveries if ".experts." in d.slot}
print(json.dumps({
    "resident": plan.bytes_resident, "read": plan.bytes_read, "problems": len(plan.problems), "skipped": len(plan.skipped),
    "tensors": len(plan.catalog.tensors), "experts": len(experts), "digest": plan.digest, "calls": calls, "peak": peak,
}))
"""


def planned(folder: Path, ep_rank: int) -> dict[str, Any]:
    """A plan made in a process of its own, whose memory is the plan's."""
    command = [sys.executable, "-c", _CHILD, str(folder), str(ep_rank)]
    done = subprocess.run(command, env=child_env(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_plan_at_full_size(name: str, tmp_path: Path) -> None:
    """TP 8, EP 64: resident and read bytes of a rank are those computed by hand, down to the byte; catalogue and plan take
    a few steps for each tensor (benchmark/plan.md has the time) and the whole process under 1 GiB; and two ranks agree."""
    case = CASES[name]
    config = {key: value for key, value in case.config.items() if key != "quantization_config"}
    write_sparse_checkpoint(tmp_path, case.tensors, case.shards, config)
    found = planned(tmp_path, case.ep_rank)
    assert found["problems"] == 0
    assert found["tensors"] == len(case.tensors)
    assert found["skipped"] == case.skipped
    moe = 61 - case.config["first_k_dense_replace"]
    assert found["experts"] == moe * case.held * 3
    body, vocabulary, routers, biases = case.elements()
    assert found["resident"] == (body + vocabulary) * BF16 + (routers + biases) * F32
    assert found["read"] == (body + vocabulary + routers) * BF16 + biases * F32
    assert found["calls"] < MOST_CALLS * found["tensors"], found
    assert found["peak"] < 2**30, found
    assert planned(tmp_path, 0)["digest"] == found["digest"]
