"""The bench on one GPU: what only a device has, in the worker's line and in the limits.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig
from rtp_llm.bench.checksum import COLUMNS, BitsSum
from rtp_llm.bench.contenders import CONTENDERS
from rtp_llm.bench.limits import warm_limits
from rtp_llm.bench.measure import run_bench
from rtp_llm.bench.request import WARM, BenchRequest
from rtp_llm.bench.synthetic import llama, write_checkpoint
from rtp_llm.checkpoint import read_catalog

pytestmark = pytest.mark.gpu


def test_the_device_sums_as_the_host_does() -> None:
    """One number for the same bits on both, for whole rows, rests and addresses that are not aligned."""
    for size in (1, 7, 8 * COLUMNS, 8 * COLUMNS * 3 + 13):
        content = torch.randint(0, 256, (size + 3,), dtype=torch.uint8)
        host, device = BitsSum(torch.device("cpu")), BitsSum(torch.device("cuda"))
        assert host(content[3:]).item() == device(content.cuda()[3:]).item()


def test_everybody_who_is_here_agrees(tmp_path: Path) -> None:
    """All installed loaders, once, warm: equal values, device memory counted, ours bounded by the weights and a buffer."""
    write_checkpoint(tmp_path, llama(0.3))
    names = tuple(c.name for c in CONTENDERS)
    request = BenchRequest(read_catalog(tmp_path), "cuda:0", LoadConfig(), ParallelConfig(), names, 1, (WARM,))
    found = run_bench(request)
    assert found["problems"] == []
    rows = {c["name"]: c for c in found["contenders"] if c["status"] == "measured"}
    assert {"rtp-llm", "safetensors", "safetensors-to", "transformers"} <= rows.keys()
    assert len({c["checksum"] for c in rows.values() if c["places"] == c["wanted"]}) == 1
    ours = rows["rtp-llm"]["results"][WARM]
    assert request.catalog.total_bytes <= ours["peak_device_bytes"] <= request.catalog.total_bytes + (256 << 20)
    assert found["reachable"][WARM]["name"] in ("pinned_copy", "cached_read")


def test_limits(tmp_path: Path) -> None:
    """Copy from pinned memory and cached reads into it are measured and positive."""
    write_checkpoint(tmp_path, llama(0.1))
    limits = warm_limits(sorted(tmp_path.glob("*.safetensors")), torch.device("cuda"))
    assert [(x.name, x.reason) for x in limits] == [("pinned_copy", None), ("cached_read", None)]
    assert all(x.gb_per_s > 0 for x in limits)
