"""``rtp-llm bench`` as a user meets it: document, table, picture, exit codes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtp_llm.bench.contenders import BY_NAME
from rtp_llm.bench.faults import BenchError
from rtp_llm.bench.measure import run_bench
from rtp_llm.bench.request import COLD, WARM, BenchRequest
from rtp_llm.bench.summary import Entry, document, reachable
from rtp_llm.checkpoint import read_catalog
from rtp_llm.cli.app import main
from rtp_llm.config import LoadConfig, ParallelConfig

TWO = "rtp-llm,safetensors"


def asked(checkpoint: Path, *names: str) -> BenchRequest:
    return BenchRequest(read_catalog(checkpoint), "cpu", LoadConfig(), ParallelConfig(), names, 2)


def test_document(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document: medians within their ranges, both states of the cache, limits, ratios; everybody is listed."""
    names = f"{TWO},instanttensor"
    assert main(["bench", str(checkpoint), "--device", "cpu", "--runs", "2", "--contenders", names, "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["problems"] == [] and found["cache"]["states"] == ["warm", "cold"]
    assert found["cache"]["cold"] == {"possible": True, "how": "posix_fadvise(DONTNEED)", "reason": None}
    assert set(found["limits"]) == {"fresh_read", "cached_read", "memory_copy", "direct_read"}
    assert found["reachable"]["warm"]["name"] == "fresh_read" and found["reachable"]["cold"]["name"] == "direct_read"
    ours, theirs, absent = found["contenders"]
    assert absent["status"] == "absent" and absent["reason"] and absent["results"] == {}
    assert ours["checksum"] == theirs["checksum"] and ours["compared_with"] == "safetensors"
    for contender in (ours, theirs):
        for state, result in contender["results"].items():
            assert result["range"][0] <= result["seconds"] <= result["range"][1] and len(result["runs"]) == 2
            limits = found["reachable"][state]["runs"]
            turns = [r["bytes"] / 1e9 / r["seconds"] / limit for r, limit in zip(result["runs"], limits, strict=True)]
            assert result["ratio"] == pytest.approx(sum(turns) / 2)
            assert all(r["cached"] == (1.0 if state == "warm" else 0.0) for r in result["runs"])
    assert "run 2 of 2, cold, safetensors: " in shown.err


def test_table_and_picture(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text names machine, limits, every contender, and why one is absent; the picture is a PNG."""
    picture = tmp_path / "loading.png"
    arguments = ["--device", "cpu", "--runs", "1", "--contenders", f"{TWO},instanttensor-tuned", "--cache", "warm", "--plot", str(picture)]
    assert main(["bench", str(checkpoint), *arguments]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("fresh_read", "rtp-llm", "safetensors", "of limit", "no problems", "cold"))
    assert "absent: instanttensor-tuned" in text
    assert picture.read_bytes().startswith(b"\x89PNG\r\n") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--contenders", "rtp-llm,nobody"], "nobody"),
        (["--contenders", ","], "no such contender"),
        (["--runs", "0"], "--runs"),
        (["--plot", "nowhere/x.png"], "its directory is not there"),
        (["--plot", "x.bmp"], "not the name of a picture"),
        (["--tp_size", "3"], "tp_size"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    checkpoint: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a message; no run."""
    assert main(["bench", str(checkpoint), "--device", "cpu", *arguments]) == 2
    shown = capsys.readouterr()
    assert says in shown.err and "run 1" not in shown.err and shown.out == ""


def test_no_launcher(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Under torchrun every process would measure against the others."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench", str(checkpoint)]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_a_contender_that_fails_is_a_problem(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is installed and does not import: named with its last words, the others measured, exit code 1."""
    (tmp_path / "transformers.py").write_text("raise OSError('libbroken.so.1: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = "transformers,rtp-llm"
    assert main(["bench", str(checkpoint), "--device", "cpu", "--runs", "1", "--contenders", names, "--cache", "warm", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    broken, ours = found["contenders"]
    assert broken["status"] == "failed" and "libbroken.so.1" in broken["reason"] and broken["results"] == {}
    assert len(ours["results"]["warm"]["runs"]) == 1
    (problem,) = found["problems"]
    assert problem["fault"] == "RUN_FAILED" and "libbroken.so.1" in problem["actual"]


def line(checksum: str, cached: float = 1.0) -> dict[str, Any]:
    """A worker's line, for what is made of several."""
    names = ("startup_seconds", "first_bytes_seconds", "pinned_bytes", "peak_device_bytes", "device_bytes_taken", "threads")
    return {
        "seconds": 1.0,
        "bytes": 10,
        "bytes_resident": 10,
        "peak_host_bytes": 10,
        "import_seconds": 0.1,
        "device_seconds": 0.0,
        "device_name": "CPU",
        "checksum": checksum,
        "places": 1,
        "wanted": 1,
        "cached": cached,
        **dict.fromkeys(names),
    }


def test_other_values_are_a_problem_that_names_tensors(checkpoint: Path) -> None:
    """A loader whose bits differ from the peer's is named with tensor, expected and actual sum; so is one that varies."""
    ours = Entry(BY_NAME["rtp-llm"], None, {WARM: [line("aa"), line("bb")]}, sums={"x": 1, "y": 2})
    theirs = Entry(BY_NAME["safetensors"], None, {WARM: [line("cc")]}, sums={"x": 1, "y": 3})
    found = document(asked(checkpoint), [ours, theirs], {}, (WARM,), None, 0.0)
    first, second = found["problems"]
    assert first["fault"] == second["fault"] == "VALUES_DIFFER"
    assert {first["tensor"], second["tensor"]} == {"y", None}
    assert any(p["expected"] == f"{3:016x}" and p["actual"] == f"{2:016x}" for p in (first, second))
    assert any("other runs" in p["what"] for p in (first, second))


def test_a_warm_run_on_files_that_are_not_cached_is_a_problem(checkpoint: Path) -> None:
    """Too little memory for the page cache would make every warm number a lie."""
    entry = Entry(BY_NAME["rtp-llm"], None, {WARM: [line("aa", cached=0.5)]}, sums={"x": 1})
    (problem,) = document(asked(checkpoint), [entry], {}, (WARM,), None, 0.0)["problems"]
    assert problem["fault"] == "NOT_WARM" and problem["actual"] == "50%"


def test_what_bounds_a_load() -> None:
    """On a GPU the smaller of copy and cached reads; an unmeasured bound is no bound at all."""
    speeds = (("pinned_copy", 55.0), ("cached_read", 46.0), ("fresh_read", 4.0))
    limits = {name: {"gb_per_s": speed, "runs": [speed]} for name, speed in speeds}
    assert reachable(limits, WARM, "cuda") == {"name": "cached_read", "gb_per_s": 46.0, "runs": [46.0]}
    assert reachable(limits, WARM, "cpu") == {"name": "fresh_read", "gb_per_s": 4.0, "runs": [4.0]}
    assert reachable(limits, COLD, "cuda") is None
    assert reachable(limits | {"pinned_copy": {"gb_per_s": 0.0, "runs": [0.0]}}, WARM, "cuda") is None


def test_cold_alone_where_it_cannot_be_had(checkpoint: Path, tmp_path: Path) -> None:
    """Files whose pages stay (here: in memory anyway, tmpfs) are measured warm with the reason, and cold alone is refused."""
    memory = Path("/dev/shm")
    assert memory.is_dir(), "no tmpfs to test with"
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(dir=memory) as name:
        shutil.copytree(checkpoint, name, dirs_exist_ok=True)
        request = BenchRequest(read_catalog(name), "cpu", LoadConfig(), ParallelConfig(), ("rtp-llm",), 1, (COLD,))
        with pytest.raises(BenchError, match="NOT_COLD.*--drop_caches"):
            run_bench(request)
        found = run_bench(replace(request, states=(WARM, COLD), limits=False))
    assert found["cache"]["states"] == [WARM] and not found["cache"]["cold"]["possible"] and found["cache"]["cold"]["reason"]
