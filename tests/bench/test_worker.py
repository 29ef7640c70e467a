"""What a worker prints is a contract: ``rtp-llm bench``, the benchmarks, and people who run one by hand read it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rtp_llm.bench.contenders import BY_NAME, CONTENDERS
from rtp_llm.bench.measure import environment, record, spawn
from rtp_llm.bench.request import WARM, BenchRequest
from rtp_llm.checkpoint import read_catalog
from rtp_llm.config import LoadConfig, ParallelConfig
from tests.support.paths import child_env

FIELDS = {
    *("name", "version", "device", "device_name", "seconds", "startup_seconds", "first_bytes_seconds", "import_seconds"),
    *("device_seconds", "bytes", "bytes_resident", "peak_host_bytes", "pinned_bytes", "peak_device_bytes", "device_bytes_taken"),
    *("threads", "checksum", "places", "wanted"),
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rtp_llm.bench.worker", *arguments]
    return subprocess.run(command, env=child_env({"RTP_LLM_DEVICE": "cpu"}), capture_output=True, text=True, check=False)


def request(checkpoint: Path, **changes: Any) -> BenchRequest:
    return replace(BenchRequest(read_catalog(checkpoint), "cpu", LoadConfig(), ParallelConfig(), ("rtp-llm",), 1), **changes)


@pytest.mark.parametrize("name", ["rtp-llm", "safetensors", "transformers"])
def test_one_line_of_json_with_every_field(checkpoint: Path, name: str) -> None:
    """Whatever a library prints, stdout is one JSON object; the bytes are the checkpoint's, the memory was taken."""
    done = run(name, str(checkpoint))
    assert done.returncode == 0, done.stderr
    (text,) = done.stdout.splitlines()
    line = json.loads(text)
    assert line.keys() >= FIELDS
    total = read_catalog(checkpoint).total_bytes
    assert line["name"] == name and line["bytes"] == total and line["places"] == line["wanted"] > 0
    assert line["seconds"] > 0 and line["import_seconds"] >= 0
    assert line["peak_host_bytes"] > 0.9 * total and line["peak_device_bytes"] is None
    if name == "rtp-llm":
        assert 0 < line["startup_seconds"] <= line["first_bytes_seconds"]
        assert line["phases"]["transport"] < line["seconds"]


def test_all_that_run_here_agree(checkpoint: Path) -> None:
    """Every contender that this machine has loads the same bits; a peer that is not there is told, not passed over."""
    asked = request(checkpoint)
    lines = [spawn(asked, c) for c in CONTENDERS if c.absent("cpu", frozenset({"safetensors"})) is None]
    assert all(isinstance(line, dict) for line in lines), lines
    sums = {line["checksum"] for line in lines if isinstance(line, dict) and "unavailable" not in line}
    assert len(sums) == 1 and len(lines) >= 3


def test_rank_local(checkpoint: Path) -> None:
    """At TP 2 ours reads its part alone, and a loader that reads everything is compared on that part."""
    asked = request(checkpoint, parallel=ParallelConfig(2, 1))
    ours, theirs = spawn(asked, BY_NAME["rtp-llm"]), spawn(asked, BY_NAME["safetensors"])
    assert isinstance(ours, dict) and isinstance(theirs, dict)
    assert ours["checksum"] == theirs["checksum"]
    assert ours["bytes"] < 0.7 * theirs["bytes"]


def test_a_bad_checkpoint_is_a_message(tmp_path: Path) -> None:
    """A user's mistake: exit code 2, one message, no traceback, nothing on stdout."""
    done = run("rtp-llm", str(tmp_path))
    assert done.returncode == 2 and "NO_WEIGHTS" in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


def test_a_failure_is_a_reason(tmp_path: Path) -> None:
    """A worker that ends with an error gives its last words instead of a result."""
    (tmp_path / "config.json").write_text("{}")
    checkpoint = tmp_path / "x"
    checkpoint.mkdir()
    asked = BenchRequest(read_catalog(checkpoint), "cpu", LoadConfig(), ParallelConfig(), ("safetensors",), 1)
    reason = spawn(asked, BY_NAME["safetensors"])
    assert isinstance(reason, str) and reason.startswith("exit code 2: ") and "no weights" in reason


def test_other_settings_do_not_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer gets the variables of its own row, and none that tune it otherwise or make it a rank."""
    monkeypatch.setenv("FASTSAFETENSORS_ODIRECT", "1")
    monkeypatch.setenv("INSTANTTENSOR_BACKEND", "MMAP")
    monkeypatch.setenv("WORLD_SIZE", "4")
    tuned, plain = environment(BY_NAME["fastsafetensors-tuned"]), environment(BY_NAME["fastsafetensors"])
    assert tuned["FASTSAFETENSORS_ODIRECT"] == "0" and "FASTSAFETENSORS_ODIRECT" not in plain
    assert "WORLD_SIZE" not in plain and "INSTANTTENSOR_BACKEND" not in plain


def test_absence_is_told_by_reason() -> None:
    """What keeps a contender out: its package, the device, the format."""
    plain = BY_NAME["safetensors"]
    here = frozenset({"safetensors"})
    assert plain.absent("cpu", here) is None
    assert replace(plain, package="no-such-distribution").absent("cpu", here) == "no-such-distribution is not installed"
    assert replace(plain, modules=("no_such_module.part",)).absent("cpu", here) == "safetensors is not installed"
    assert BY_NAME["safetensors-to"].absent("cpu", here) == "does not load to cpu"
    assert plain.absent("cpu", frozenset({"torch"})) == "reads safetensors files only"
    assert BY_NAME["rtp-llm"].absent("cpu", frozenset({"torch"})) is None


def test_bytes_over_time(checkpoint: Path) -> None:
    """The recorded run has everything in place at its end, in order of time, and the kernel counted the reads."""
    events = record(request(checkpoint), "rtp-llm", WARM)
    total = read_catalog(checkpoint).total_bytes
    placed = events["curves"]["placed"]
    assert events["total"] == total == placed[-1][1]
    assert all(a[0] <= b[0] and a[1] <= b[1] for a, b in zip(placed, placed[1:], strict=False))
    # No more than that: how long a busy machine takes between two looks at its clock nobody knows.
    assert events["started"] <= placed[0][0] and events["seconds"] > 0
    assert events["curves"]["read"][-1][1] >= total
