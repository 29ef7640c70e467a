"""The same commands on several ranks, over gloo: one answer, from rank 0."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split, Whitespace
from transformers import PreTrainedTokenizerFast

from rtp_llm.cli.options import command_settings
from rtp_llm.cli.ranks import Launch, launched, speaks
from rtp_llm.errors import ConfigError
from tests.support.paths import child_env
from tests.support.ranks import ANSWER_IMPORTS, run_commands
from tests.support.tiny import save_tiny_llama

CLI = ["-m", "rtp_llm.cli"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_key_value_heads=6)


@pytest.mark.parametrize("size", [2, 3])
def test_only_rank_0_prints(tiny: Path, size: int) -> None:
    """``tp_size`` is the number of processes; the other ranks load their share in silence."""
    results = run_commands([[*CLI, "load", str(tiny), "--device", "cpu", "--json"]] * size)
    report = json.loads(results[0].stdout)
    assert (report["tp_size"], report["tp_rank"]) == (size, 0)
    assert f"tp_size={size} (launcher)" in results[0].stderr
    assert [(r.stdout, r.stderr) for r in results[1:]] == [("", "")] * (size - 1)


def test_torchrun_itself(tiny: Path) -> None:
    """The documented command line works."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "rtp_llm.cli", "plan", str(tiny), "--json"]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["tp_size"] == 2


def test_an_error_that_all_ranks_have_is_told_once(tiny: Path) -> None:
    """Sizes that do not divide: every rank exits with 2, rank 0 tells why, as a document too."""
    results = run_commands([[*CLI, "load", str(tiny), "--device", "cpu", "--json"]] * 4, check=False)
    assert [r.returncode for r in results] == [2] * 4
    error = json.loads(results[0].stdout)["error"]
    assert error["problems"][0]["fault"] == "INDIVISIBLE" and "Traceback" not in results[0].stderr
    assert [(r.stdout, r.stderr) for r in results[1:]] == [("", "")] * 3


def test_an_error_of_one_rank_ends_all_and_is_told_by_rank_0(tiny: Path, tmp_path: Path) -> None:
    """Another checkpoint on rank 1, and none at all: no rank waits, and the message names rank 1 and the cause."""
    other = save_tiny_llama(tmp_path / "other", num_key_value_heads=6, intermediate_size=64)
    for wrong, word in ((other, "RANKS_DISAGREE"), (tmp_path / "nothing", "NO_DIRECTORY")):
        commands = [[*CLI, "load", str(path), "--device", "cpu"] for path in (tiny, wrong)]
        results = run_commands(commands, check=False)
        assert [r.returncode for r in results] == [2, 2]
        assert word in results[0].stderr and "rank 1" in results[0].stderr and "Traceback" not in results[0].stderr + results[1].stderr


def test_a_rank_that_cannot_prepare_ends_all(tiny: Path, tmp_path: Path) -> None:
    """Weights are there on both ranks, the tokenizer's files on neither or on one: nobody waits for the other's answer."""
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(other)
    for first, second in ((tiny, other), (other, tiny)):
        commands = [[*CLI, "generate", str(path), "--device", "cpu", "--raw", "--prompt", "a b"] for path in (first, second)]
        results = run_commands(commands, check=False, imports=ANSWER_IMPORTS)
        assert [r.returncode for r in results] == [2, 2], results
        assert "BAD_TOKENIZER" in results[0].stderr and "Traceback" not in results[0].stderr + results[1].stderr


def test_ranks_with_different_prompts_do_not_answer(tiny: Path, tmp_path: Path) -> None:
    """Another prompt, and a chat template that tells the time: an error of both ranks, where together they would make up a text."""
    folder = tmp_path / "chatty"
    shutil.copytree(tiny, folder)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *"0123456789"])}, unk_token="?"))
    words.pre_tokenizer = Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%S %f') }}")
    generate = [*CLI, "generate", str(folder), "--device", "cpu", "--max_new_tokens", "2"]
    raw, timed = [[*generate, "--raw", "--prompt", prompt] for prompt in ("1 2", "2 1")], [[*generate, "--prompt", "1"]] * 2
    for commands in (raw, timed):
        results = run_commands(commands, check=False, imports=ANSWER_IMPORTS)
        assert [r.returncode for r in results] == [2, 2], results
        assert re.search(r"RANKS_DISAGREE.*rank 1.*prompt 1: \d+ tokens", results[0].stderr), results[0].stderr
        assert "Traceback" not in results[0].stderr + results[1].stderr
    results = run_commands(raw[:1] * 2, imports=ANSWER_IMPORTS)
    assert results[0].stdout and not results[1].stdout


def test_export_of_a_sharded_model(tiny: Path, tmp_path: Path) -> None:
    """Two ranks, each with half of the weights, write the source's bytes back."""
    run_commands([[*CLI, "export", str(tiny), str(tmp_path / "out"), "--device", "cpu"]] * 2)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_sizes_that_contradict_the_launcher_are_refused() -> None:
    """Flag or variable: neither may say another size or rank than torchrun; the right one is accepted."""
    environ = {"RANK": "1", "WORLD_SIZE": "2"}
    chosen = {c.setting.name: (c.value, c.source) for c in command_settings({"tp_size": "2"}, environ).resolved}
    assert (chosen["tp_size"], chosen["tp_rank"]) == ((2, "launcher"), (1, "launcher"))
    for flags, extra in (({"tp_size": "4"}, {}), ({}, {"RTP_LLM_TP_SIZE": "4"}), ({"tp_rank": "0"}, {})):
        with pytest.raises(ConfigError) as caught:
            command_settings(flags, environ | extra)
        assert caught.value.problems[0].code == "CONTRADICTION"


def test_expert_parallel_groups_divide_the_processes() -> None:
    """With ``ep_size`` the processes form that many groups of ``tp_size``; one that does not divide them is refused."""
    places = []
    for rank in range(4):
        made = command_settings({"ep_size": "2"}, {"RANK": str(rank), "WORLD_SIZE": "4"}).parallel
        places.append((made.tp_size, made.tp_rank, made.ep_size, made.ep_rank))
    assert places == [(2, 0, 2, 0), (2, 1, 2, 0), (2, 0, 2, 1), (2, 1, 2, 1)]
    for bad in ("3", "5", "0", "-1", "x"):
        with pytest.raises(ConfigError, match="ep_size"):
            command_settings({"ep_size": bad}, {"RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "²"},
    ],
)
def test_a_broken_launch_is_refused_aloud(environ: dict[str, str]) -> None:
    """Half of torchrun's environment, or values that are no ranks, are not taken for one process alone."""
    with pytest.raises(ConfigError):
        launched(environ)
    assert speaks(environ)


def test_a_launch_is_read() -> None:
    """torchrun's variables, or none of them."""
    assert launched({}) is None and launched({"RANK": "", "WORLD_SIZE": " "}) is None
    assert launched({"RANK": "1", "WORLD_SIZE": "3"}) == Launch(1, 3)
    assert speaks({}) and speaks({"RANK": "0", "WORLD_SIZE": "3"}) and not speaks({"RANK": "1", "WORLD_SIZE": "3"})
