"""Expert parallelism from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rtp_llm.cli.app import main
from rtp_llm.cli.output import ranges
from tests.moe.variants import make
from tests.support.ranks import run_commands
from tests.support.tiny import save_tiny_llama


def table(text: str) -> list[list[str]]:
    """The rows of the expert table, cells by runs of blanks."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "ep rank" in line)
    return [line.split("  ") for line in lines[start + 2 :] if line[:1] in " 0123456789" and line.strip()]


def test_plan_prints_which_rank_holds_which(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seven experts on three ranks: a row for each rank with its experts, bytes of a layer, and the checkpoint's layout."""
    make("qwen3_moe", tmp_path)
    assert main(["plan", str(tmp_path), "--ep_size", "3", "--ep_rank", "1"]) == 0
    out = capsys.readouterr().out
    assert "0 of 1, expert-parallel 1 of 3" in out
    rows = [[cell.strip() for cell in row if cell.strip()] for row in table(out)][:3]
    # One expert is 3 * 24 * 32 float32: 9,216 bytes.
    assert rows == [
        ["0-1", "0", "0-2", "27.6 kB", "per-expert"],
        ["0-1", "1", "3-4", "18.4 kB", "per-expert"],
        ["0-1", "2", "5-6", "18.4 kB", "per-expert"],
    ]


def test_plan_in_json_has_every_rank_and_every_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Layers with rows of their own are entries of their own; an expert that a rank holds twice counts twice."""
    make("qwen3_moe", tmp_path / "model", published=False)
    rows = [[0, 1, 2, 3, 4, 5, 6, 6], [6, 5, 4, 3, 3, 2, 1, 0]]
    (tmp_path / "eplb.json").write_text(json.dumps({"phy2log": rows}))
    command = ["plan", str(tmp_path / "model"), "--tp_size", "2", "--ep_size", "2", "--eplb", str(tmp_path / "eplb.json"), "--json"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["experts"] == [
        {
            "layers": [layer],
            "count": 7,
            "layout": {"gate_up": "stacked", "down": "stacked"},
            "ranks": [{"ep_rank": rank, "experts": row[4 * rank : 4 * rank + 4], "bytes": 4 * 9216 // 2} for rank in (0, 1)],
        }
        for layer, row in enumerate(rows)
    ]


def test_dense_models_have_no_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No table without experts; and expert ranks are refused with what to do instead."""
    save_tiny_llama(tmp_path)
    assert main(["plan", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["experts"] == []
    assert main(["plan", str(tmp_path), "--ep_size", "2"]) == 2
    assert "NO_EXPERTS" in capsys.readouterr().err


def test_processes_form_expert_groups(tmp_path: Path) -> None:
    """Four processes with --ep_size 2 are two groups of two; rank 0 reports its place, and its share was verified."""
    make("qwen3_moe", tmp_path)
    command = ["-m", "rtp_llm.cli", "load", str(tmp_path), "--device", "cpu", "--ep_size", "2", "--verify", "--json"]
    results = run_commands([command] * 4, timeout=120)
    report = json.loads(results[0].stdout)
    assert (report["tp_size"], report["tp_rank"], report["ep_size"], report["ep_rank"]) == (2, 0, 2, 0)
    assert report["verified"] > 0
    assert all(not result.stdout for result in results[1:])


def test_ranks_with_other_tables_are_told_apart(tmp_path: Path) -> None:
    """A table that only one rank has ends both at once, with the first difference; nothing hangs."""
    make("qwen3_moe", tmp_path / "model")
    (tmp_path / "eplb.json").write_text('{"phy2log": [6, 5, 4, 3, 2, 1, 0, 0]}')
    command = ["-m", "rtp_llm.cli", "load", str(tmp_path / "model"), "--device", "cpu", "--ep_size", "2"]
    results = run_commands([command, [*command, "--eplb", str(tmp_path / "eplb.json")]], timeout=60, check=False)
    assert [result.returncode for result in results] == [2, 2]
    assert "RANKS_DISAGREE" in results[0].stderr and "experts of layer 0 on expert-parallel ranks" in results[0].stderr


@pytest.mark.parametrize(("numbers", "text"), [([], "none"), ([3], "3"), ([0, 1, 2, 5, 7, 8], "0-2, 5, 7-8"), ([0, 2, 2, 1], "0, 2, 2, 1")])
def test_ranges(numbers: list[int], text: str) -> None:
    """Runs are shortened; order and copies stay."""
    assert ranges(numbers) == text
