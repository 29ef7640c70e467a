"""Slopes of known curves, and what is measured of several ranks and of a start."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest

from rtp_llm.bench import ranks, shards, start
from rtp_llm.bench.faults import BenchError
from rtp_llm.bench.growth import draw_growth, exponent, growth, steepest
from rtp_llm.config import LoadConfig, ParallelConfig


def test_exponents() -> None:
    """The slope on logarithmic axes: 1 for a line, 2 for a parabola; the steepest shows a steep end behind a flat beginning."""
    xs = [1.0, 2.0, 4.0, 8.0]
    assert exponent(xs, [3 * x for x in xs]) == pytest.approx(1)
    assert exponent(xs, [x * x for x in xs]) == pytest.approx(2)
    assert exponent([1.0], [1.0]) is None and steepest([1.0], [1.0]) is None
    assert steepest([4.0, 1.0, 2.0], [4.0, 1.0, 1.0]) == pytest.approx(2)


def test_growth_and_its_picture(tmp_path: Path) -> None:
    """Both slopes beside the points, and a PNG of several."""
    points = [(x, {"seconds": x, "processor_seconds": 2 * x, "phases": {"transport": x * x}}) for x in (1.0, 2.0, 3.0)]
    found = growth("GB", points)
    assert (found["against"], len(found["points"])) == ("GB", 3)
    assert (found["exponent"], found["exponent_of_processor"]) == (pytest.approx(1), pytest.approx(1))
    assert found["exponent_of_transport"] == pytest.approx(2)
    draw_growth(tmp_path / "growth.png", [found, found])
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_two_ranks_at_once(checkpoint: Path) -> None:
    """Each rank says what it placed; together that is more than the checkpoint, by what both hold, and each has its own phases."""
    places = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]
    found = ranks.launch(str(checkpoint), places, LoadConfig(device="cpu", load_method="scratch", kernels="torch"))
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert len(found) == 2 and all(rank["seconds"] >= rank["phases"]["transport"] > 0 for rank in found)
    assert 0.95 * size < sum(rank["bytes_placed"] for rank in found) < 1.2 * size
    assert all(rank["bytes_read"] >= rank["bytes_placed"] for rank in found)


def test_a_rank_that_fails_is_told(checkpoint: Path) -> None:
    """Its last words, as an error of the bench."""
    places = [ParallelConfig(tp_size=3, tp_rank=rank) for rank in range(3)]
    with pytest.raises(BenchError, match="INDIVISIBLE"):
        ranks.launch(str(checkpoint), places, LoadConfig(device="cpu", kernels="torch"))


def test_ranks_that_say_much_hold_nobody_up() -> None:
    """More than a pipe holds, on both streams, while the other rank waits for them; all that failed are named."""
    wait = "import os, pathlib, sys, time\nmine = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
    with tempfile.TemporaryDirectory() as folder:
        loud = [wait + "print('x' * 300000)\nprint('x' * 300000, file=sys.stderr)\nmine.touch()\nprint(1)", folder]
        patient = [wait + "while not (mine.parent / '1').exists(): time.sleep(0.05)\nprint(0)", folder]
        assert ranks.run_commands([["-c", *patient], ["-c", *loud]], os.environ, 60.0) == [0, 1]
    with pytest.raises(BenchError, match="rank 0: first; rank 1: exit code 3"):
        ranks.run_commands([["-c", "raise SystemExit('first')"], ["-c", "raise SystemExit(3)"]], os.environ, 60.0)


def test_steps_of_a_start(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with seconds of each step; nothing is loaded."""
    assert start.main([str(checkpoint), "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"plan", "team", "allocate"} and all(seconds > 0 for seconds in found.values())


def test_rows_against_columns(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with what each kind of matrix takes; of a small Llama a rank keeps half of each."""
    assert shards.main([str(checkpoint), "--turns", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["row"]["bytes"] < found["column"]["bytes"]
    for kind in ("column", "row"):
        assert len(found[kind]["bytes_per_s"]) == 2 and all(rate > 0 for rate in found[kind]["bytes_per_s"])
        assert found[kind]["bytes"] <= found[kind]["bytes_read"]
