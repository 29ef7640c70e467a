"""A model that was stacked, fused, sharded and spread over ranks is written back byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from rtp_llm import ParallelConfig, export_checkpoint, load_model
from rtp_llm.errors import PlanError
from tests.moe.rank_worker import Shape, export
from tests.moe.variants import VARIANTS, make
from tests.support.ranks import run_ranks


def assert_same_files(one: Path, other: Path) -> None:
    """Same weight files with the same tensors, in shape, dtype and bytes."""
    files = sorted(file.name for file in one.glob("*.safetensors"))
    assert files and files == sorted(file.name for file in other.glob("*.safetensors"))
    for name in files:
        with safe_open(one / name, "pt") as a, safe_open(other / name, "pt") as b:
            assert sorted(a.keys()) == sorted(b.keys())
            for tensor in a.keys():
                x, y = a.get_tensor(tensor), b.get_tensor(tensor)
                assert (x.dtype, x.shape) == (y.dtype, y.shape), tensor
                assert x.numpy().tobytes() == y.numpy().tobytes(), tensor


@pytest.mark.parametrize("published", [True, False], ids=["published", "stacked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_gives_back_the_checkpoint(variant: str, published: bool, tmp_path: Path) -> None:
    """One process, either layout."""
    make(variant, tmp_path / "in", published=published)
    export_checkpoint(load_model(tmp_path / "in", device="cpu"), tmp_path / "out")
    assert_same_files(tmp_path / "in", tmp_path / "out")


def test_export_from_expert_parallel_ranks(tmp_path: Path) -> None:
    """Four processes: EP 4, TP 2 x EP 2, and copies of experts; either layout; dense layers and shared experts as well."""
    jobs = []
    for variant in ("qwen2_moe", "glm4_moe"):
        count = 7 if variant == "qwen2_moe" else 8
        (tmp_path / f"{variant}.json").write_text(json.dumps({"phy2log": [*range(count), 0, 2, 2, 1, 3][:12]}))
        for published in (True, False):
            folder = tmp_path / f"{variant}-{published}"
            make(variant, folder, published=published)
            for shape in (Shape(1, 4), Shape(2, 2), Shape(1, 4, str(tmp_path / f"{variant}.json"))):
                jobs.append((str(folder), shape, f"{folder}-{len(jobs)}"))
    run_ranks(4, export, jobs, timeout=180)
    for source, _, out in jobs:
        assert_same_files(Path(source), Path(out))


def test_one_rank_of_several_cannot_export(tmp_path: Path) -> None:
    """Experts of other ranks are not there, and the message says for each whose they are not."""
    make("qwen3_moe", tmp_path / "in")
    loaded = load_model(tmp_path / "in", device="cpu", parallel=ParallelConfig(ep_size=2))
    with pytest.raises(PlanError, match="no set of ranks holds all of layers.0.experts.4.down.weight"):
        export_checkpoint(loaded, tmp_path / "out")
