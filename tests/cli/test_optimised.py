"""``python -O``, which leaves assertions out: what is promised to a user is kept without them."""

from __future__ import annotations

import filecmp
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.moe.variants import make
from tests.support.paths import child_env
from tests.support.tiny import save_tiny_llama

#: What an embedding program does, with promises that are broken on purpose.
_BROKEN = """
import sys
import torch
from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import RtpLlmError
from rtp_llm.layers.base import param_specs
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.loader.budget import transport
from rtp_llm.parallel.shard import even
from rtp_llm.transport.scratch.reader import ScratchTransport
from dataclasses import replace

assert False, "assertions are on"

def unplanned():
    layer = RMSNorm("n", 4, 1e-6, dtype=torch.float32)
    layer.register_buffer("table", torch.zeros(3))
    list(param_specs(torch.nn.Sequential(layer)))

def lost():
    class Losing(ScratchTransport):
        def deliver(self, plan, *rest):
            moved = super().deliver(plan, *rest)
            return replace(moved, bytes_placed=moved.bytes_placed - 1)
    transport.ScratchTransport = Losing
    load_model(sys.argv[1], load=LoadConfig(device="cpu", load_method="scratch"))

for broken in (unplanned, lost, lambda: even(7, 2, 0)):
    try:
        broken()
    except RtpLlmError as error:
        print(error)
    else:
        print("nobody noticed")
"""


def optimised(*arguments: object) -> subprocess.CompletedProcess[str]:
    """``python -O`` with these arguments, in a process of its own."""
    return subprocess.run([sys.executable, "-O", *map(str, arguments)], env=child_env(), capture_output=True, text=True, check=False)


def command(*arguments: object) -> tuple[int, dict[str, Any]]:
    """The exit code of a command, and its JSON document."""
    done = optimised("-m", "rtp_llm.cli", *arguments, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("optimised") / "llama", shard="20KB")


def test_assertions_are_off() -> None:
    """The processes of this file have none."""
    assert optimised("-c", "assert False").returncode == 0


@pytest.mark.parametrize("settings", [(), ("--quantization", "inline-fp8-block"), ("--load_method", "fastsafetensors")])
def test_a_good_checkpoint_loads(tiny: Path, settings: tuple[str, ...]) -> None:
    """Plain and quantised on the way, by both transports: all of it is there, and is what the files hold."""
    code, report = command("load", tiny, "--device", "cpu", "--verify", *settings)
    assert code == 0 and report["verified"] > 0
    assert report["load_method"] == ("fastsafetensors" if "fastsafetensors" in settings else "scratch")


def test_stacked_experts_load(tmp_path: Path) -> None:
    """A rank's part of tensors that hold all experts."""
    make("qwen3_moe", tmp_path / "moe", published=False)
    code, report = command("load", tmp_path / "moe", "--device", "cpu", "--verify", "--ep_size", 2)
    assert code == 0 and report["verified"] > 0


def test_a_real_model_loads(smollm2: Path) -> None:
    """SmolLM2, every byte."""
    code, report = command("load", smollm2, "--device", "cpu", "--verify")
    assert code == 0 and report["verified"] == 272


def without_a_tensor(directory: Path) -> None:
    file = sorted(directory.glob("*.safetensors"))[0]
    tensors = load_file(file)
    tensors.popitem()
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: f for name, f in index["weight_map"].items() if f != file.name or name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(directory: Path) -> None:
    file = sorted(directory.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-9])


def of_another_shape(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))


@pytest.mark.parametrize(
    ("damage", "fault"), [(without_a_tensor, "MISSING_TENSOR"), (cut, "TRUNCATED_FILE"), (of_another_shape, "SHAPE_MISMATCH")]
)
def test_a_damaged_checkpoint_is_refused(tiny: Path, tmp_path: Path, damage: Callable[[Path], None], fault: str) -> None:
    """By ``load`` and by ``plan``, for what is wrong with it."""
    directory = shutil.copytree(tiny, tmp_path / "damaged")
    damage(directory)
    code, found = command("load", directory, "--device", "cpu")
    assert code == 2 and fault in {problem["fault"] for problem in found["error"]["problems"]}
    done = optimised("-m", "rtp_llm.cli", "plan", directory)
    assert done.returncode in (1, 2) and fault in done.stdout + done.stderr


def test_an_export_gives_the_source_back(tiny: Path, tmp_path: Path) -> None:
    """Byte for byte."""
    code, _ = command("export", tiny, tmp_path / "out", "--device", "cpu")
    files = [file.name for file in tiny.glob("*.safetensors*")]
    assert code == 0 and len(files) > 2
    assert filecmp.cmpfiles(tiny, tmp_path / "out", files, shallow=False) == (files, [], [])


def test_broken_promises_are_noticed(tiny: Path) -> None:
    """A parameter that nobody fills, bytes that a transport did not place, a part of a size that cannot be divided: an error each,
    which says that it is to be reported."""
    done = optimised("-c", _BROKEN, tiny)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [("INTERNAL" in line, "please report it" in line) for line in lines] == [(True, True)] * 3, lines
    assert "(tensor 0.table)" in lines[0] and "bytes that were planned" in lines[1] and "7 over 2" in lines[2]
