"""Ranks as real processes over gloo: bytes arrive as they were, and a failure of one is the failure of all, soon."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm.errors import ConfigError
from rtp_llm.parallel.world import join_world
from tests.moe import variants as experts
from tests.parallel import workers
from tests.support.ranks import RanksFailed, RanksTimedOut, run_commands, run_ranks
from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", shard="40KB", num_attention_heads=8, num_key_value_heads=4))


def test_payloads_of_unequal_length() -> None:
    """Every rank gets every payload, empty ones too."""
    payloads = [b"", b"one", bytes(range(256)) * 3]
    assert [r.value for r in run_ranks(3, workers.gather, payloads)] == [payloads] * 3


def test_disagreement_names_the_first_difference() -> None:
    """All ranks fail with one message: which rank, and the first line in which its plan differs from rank 0's."""
    lines = [["a", "b", "c"], ["a", "b", "c"], ["a", "X", "Y"]]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(3, workers.agreed, lines)
    for result in caught.value.results:
        assert "RANKS_DISAGREE" in result.stderr and "rank 2" in result.stderr
        assert "expected b, found X" in result.stderr


def test_another_checkpoint_on_one_of_four_ranks(checkpoint: str, tmp_path: Path) -> None:
    """One rank is given other weights of the same shapes in another file layout: all four end within 10 s, with the reason."""
    other = str(save_tiny_llama(tmp_path / "other", num_attention_heads=8, num_key_value_heads=4, seed=1))
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, workers.load_or_say, [checkpoint, checkpoint, other, checkpoint])
    for result in caught.value.results:
        assert result.returncode == 2, str(result)
        assert "its plan is not that of rank 0" in result.stderr and "model.safetensors" in result.stderr


def test_a_checkpoint_with_the_same_headers_on_one_rank(checkpoint: str, tmp_path: Path) -> None:
    """Weights of the same names, shapes and files but other values, or another config.json: refused, not mixed."""
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4}
    other = save_tiny_llama(tmp_path / "other", shard="40KB", seed=1, **sizes)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, workers.load_or_say, [checkpoint, str(other)])
    for result in caught.value.results:
        assert "RANKS_DISAGREE" in result.stderr and "content of model-" in result.stderr, str(result)
    scaled = save_tiny_llama(tmp_path / "scaled", shard="40KB", rms_norm_eps=0.1, **sizes)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, workers.load_or_say, [checkpoint, str(scaled)])
    for result in caught.value.results:
        assert "RANKS_DISAGREE" in result.stderr and "config.json" in result.stderr, str(result)


def test_a_bad_file_on_one_rank_is_everyones_error(checkpoint: str, tmp_path: Path) -> None:
    """A rank that finds no checkpoint makes the others fail with its message, not with a time-out."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, workers.load_or_say, [checkpoint, str(tmp_path / "nothing")])
    for result in caught.value.results:
        assert result.returncode == 2 and "NO_DIRECTORY" in result.stderr, str(result)


def test_all_findings_of_a_rank_reach_the_others(checkpoint: str, tmp_path: Path) -> None:
    """Two tensors are missing on rank 1 only: rank 0 is told of both, as if it had found them."""
    broken = save_tiny_llama(tmp_path / "broken", num_attention_heads=8, num_key_value_heads=4)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, workers.load_or_say, [checkpoint, str(broken)])
    for result in caught.value.results:
        assert result.returncode == 2, str(result)
        assert "model.norm.weight" in result.stderr and "model.layers.0.mlp.up_proj.weight" in result.stderr, str(result)


@pytest.mark.parametrize(
    ("way", "reason"),
    [("killed", "RANK_LOST: a rank died"), ("frozen", "RANK_LOST: a rank stopped answering"), ("defect", "ZeroDivisionError: a defect")],
)
def test_one_of_four_dies(checkpoint: str, way: str, reason: str) -> None:
    """A rank that is killed or meets a defect while it reads: the other three end with the reason, long before the time-out and not
    because of silence.  One that freezes is given half of the time-out first, since a healthy rank may be slow."""
    timeout_s = 20.0 if way == "frozen" else 600.0  # beyond what this test waits
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, workers.load_while_one_dies, checkpoint, way, timeout_s, timeout=120)
    for result in caught.value.results:
        if result.rank != 2:
            assert result.returncode == 2, str(caught.value)
            assert reason in result.stderr and "rank 2" in result.stderr, str(result)
    assert isinstance(caught.value, RanksTimedOut) == (way == "frozen")


def test_a_rank_that_dies_during_a_forward_pass(checkpoint: str) -> None:
    """The others' collective ends with the group's error, not with one that looks like a defect."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(2, workers.answer_while_one_dies, checkpoint, timeout=40)
    survivor = caught.value.results[0]
    assert survivor.returncode == 2 and "RANK_LOST" in survivor.stderr, str(survivor)


@pytest.mark.parametrize("way", ["scratch", "fastsafetensors", "expert-parallel", "failing"])
def test_loads_of_one_launch_do_not_add_up(way: str, checkpoint: str, tmp_path: Path) -> None:
    """Ten loads on two ranks leave no more threads and sockets than two do: with their models kept, run and exported, by either
    transport, with groups of experts, and where one rank's checkpoint is absent."""
    directories, settings, ep_size, out = [checkpoint] * 2, {}, 1, str(tmp_path)
    if way == "fastsafetensors":
        settings["load_method"] = "fastsafetensors"
    elif way == "expert-parallel":
        experts.make("qwen3_moe", tmp_path / "moe")
        directories, ep_size = [str(tmp_path / "moe")] * 2, 2
    elif way == "failing":
        directories = [checkpoint, str(tmp_path / "nothing")]
    times = 4 if way == "failing" else 10  # an error takes seconds to be told
    for result in run_ranks(2, workers.held_after, times, directories, ep_size, out, settings, timeout=120):
        threads, sockets = result.value[1]
        # Fewer where the other rank has ended.
        assert all(after[0] <= threads and after[1] <= sockets for after in result.value[2:]), str(result.value)


def test_launcher_variables_that_are_not_numbers() -> None:
    """A broken environment is named before any process waits for another."""
    with pytest.raises(ConfigError, match="WORLD_SIZE is not a number"):
        join_world({"RANK": "0", "WORLD_SIZE": "two"}, "cpu", 1.0)
    assert join_world({}, "cpu", 1.0).size == 1
    assert torch.distributed.is_initialized() is False


def test_ranks_need_not_hash_alike(tmp_path: Path) -> None:
    """Every interpreter orders its sets of strings in a way of its own, which forked ranks share: ranks that differ in it agree on
    their plan, and load."""
    experts.make("qwen3_moe", tmp_path)
    script = (
        "import os, sys; os.environ['PYTHONHASHSEED'] = '1' + os.environ['RANK']; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = ["-c", script, "-m", "rtp_llm.cli", "load", str(tmp_path), "--device", "cpu", "--ep_size", "2"]
    assert [result.returncode for result in run_commands([command] * 2)] == [0, 0]
