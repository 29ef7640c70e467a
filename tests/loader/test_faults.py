"""A load that comes to harm says what happened, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rtp_llm.bench.synthetic import llama, write_checkpoint
from tests.support.paths import child_env


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All harms in one process of its own: a signal and a limit of memory are a whole process's."""
    directory = tmp_path_factory.mktemp("faults") / "llama"
    write_checkpoint(directory, llama(0.05), shards=1)
    command = [sys.executable, "-m", "tests.loader.faults", str(directory)]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [
        ("interrupt", "KeyboardInterrupt", ""),
        ("disk", "IO_ERROR", "Input/output error"),
        ("host memory", "MemoryError", ""),
        ("parameters", "OUT_OF_MEMORY", "no memory for"),
        ("cut", "SHORT_READ", "the file was cut while it was read"),
    ],
)
def test_harm_on_the_way(found: dict[str, dict[str, Any]], harm: str, error: str, text: str) -> None:
    """Ctrl-C, a read that fails, no memory for a reader or for one of the last parameters, a file that is cut: the error says
    so, naming the file, and no thread, open file or half-filled parameter is left."""
    answer = found[harm]
    assert answer["error"] == error and text in answer["text"], answer
    if error in ("IO_ERROR", "SHORT_READ"):
        assert answer["file"].endswith(".safetensors")
    assert (answer["threads"], answer["files"], answer["parameters"]) == ([], [], 0), answer


def test_the_next_load_is_whole(found: dict[str, dict[str, Any]]) -> None:
    """After all of that the same process loads the same checkpoint, bit for bit."""
    assert found["afterwards"]["verified"] > 100
