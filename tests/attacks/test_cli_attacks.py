"""Every hostile directory, through the command line: a message, an exit code, no traceback, no hang, and bounds on time and memory.

``inspect`` and ``plan`` run in forks of a process that has imported what they need without torch, ``load`` as a user starts it: a
fresh interpreter takes three times as long as all that it does.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rtp_llm.checkpoint import CheckpointFault
from tests.attacks import measure
from tests.attacks.hostile import ATTACKS, BIN, Attack, good_single
from tests.support.fork_server import ForkServer
from tests.support.paths import child_env

#: Runs a command on a checkpoint; returns exit code, output, processor seconds and peak memory.
Run = Callable[[str, Path], dict[str, Any]]

#: Past this a command hangs; it is far beyond what a refusal takes, for machines that do other work as well.
HANG_SECONDS = 60

#: MiB beyond the command's own on a checkpoint without fault.
MAX_MIB = 300

#: Exit codes of the command line: what ``inspect`` finds is its result, what ``plan`` and ``load`` meet is an error.
EXIT_CODES = {"inspect": 1, "plan": 2, "load": 2}


def fresh(command: str, path: Path) -> dict[str, Any]:
    """In an interpreter of its own."""
    arguments = [sys.executable, measure.__file__, str(HANG_SECONDS), sys.executable, "-m", "rtp_llm.cli", command, str(path)]
    done = subprocess.run(arguments, env=child_env(), capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.fixture(scope="module")
def run() -> Run:
    """In a fork."""
    server = ForkServer(["rtp_llm.cli.app", "rich.table"])

    def forked(command: str, path: Path) -> dict[str, Any]:
        ended, out, err = server.run(["-m", "rtp_llm.cli", command, str(path)], HANG_SECONDS)
        return {"code": ended.code, "out": out, "err": err, "seconds": ended.seconds, "mib": ended.mib}

    return forked


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory, run: Run) -> dict[str, Any]:
    """``inspect`` of a checkpoint without fault: what the program needs before any attack, in a fork no more than by itself."""
    directory = tmp_path_factory.mktemp("good")
    good_single(directory)
    result = run("inspect", directory)
    assert result["code"] == 0, result
    assert result["mib"] < fresh("inspect", directory)["mib"] + 5
    return result


@pytest.fixture(scope="module")
def torch_seconds() -> float:
    """Processor seconds of importing torch: some torch files need it before they can be judged, and it is what seconds are measured by
    on this machine as it is now."""
    done = subprocess.run(
        [sys.executable, measure.__file__, str(HANG_SECONDS), sys.executable, "-c", "import torch"],
        env=child_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["seconds"])


def check_manners(result: dict[str, Any], attack: Attack, idle: dict[str, Any], torch_seconds: float) -> None:
    text = result["out"] + result["err"]
    assert "Traceback" not in text, text
    assert "\x1b[2J" not in text and "\x07" not in text, "the checkpoint wrote to the terminal"
    # A refusal takes a fraction of an import of torch, which torch files may need besides.
    assert result["seconds"] < idle["seconds"] + torch_seconds * (3 if attack.file == BIN else 2), result["seconds"]
    assert result["mib"] < idle["mib"] + MAX_MIB, result["mib"]


REFUSED = [a for a in ATTACKS if a.outcome in ("problem", "config")]


@pytest.fixture(scope="module", params=REFUSED, ids=lambda a: a.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Attack, Path, Path]]:
    """An attack, the place where it was made, for one command after the other, and the path to give to them."""
    place = tmp_path_factory.mktemp("attack") / "checkpoint"
    yield request.param, place, request.param.build(place)
    shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize("command", ["inspect", "plan"])
def test_attack_is_refused(made: tuple[Attack, Path, Path], command: str, run: Run, idle: dict[str, Any], torch_seconds: float) -> None:
    """Exit code 1 (``inspect``) or 2 (``plan``), a message that names file and tensor, and bounded time and memory."""
    attack, place, path = made
    result = run(command, path)
    assert result["code"] == EXIT_CODES[command], result
    check_manners(result, attack, idle, torch_seconds)
    text = result["out"] + result["err"]
    assert not (place / "executed").exists()
    # An error's message spells out twenty findings; ``inspect`` and --json have the one that says that there are more.
    if command == "inspect" or not (is_about_config(attack, place) or attack.fault is CheckpointFault.TOO_MANY_PROBLEMS):
        assert attack.fault is not None and attack.fault.name in text, text
        assert (attack.file or "") in text, text
        assert (attack.tensor or "") in text, text


def is_about_config(attack: Attack, place: Path) -> bool:
    """Whether ``plan`` may rightly complain of an absent ``config.json`` before it looks at weights."""
    return attack.outcome == "problem" and not (place / "config.json").is_file()


#: ``load`` goes the way of ``plan``; one attack of each kind shows that.
LOADED = [
    "truncated",
    "overlapping",
    "absent_shard",
    "index_parent_directory",
    "named_pipe",
    "pickle_executes",
    "config_without_architectures",
]


@pytest.mark.parametrize("name", LOADED)
def test_load_refuses_as_plan_does(name: str, place: Path, idle: dict[str, Any], torch_seconds: float) -> None:
    """``load``, as a user starts it, ends with exit code 2 and the same message."""
    attack = next(a for a in ATTACKS if a.name == name)
    result = fresh("load", attack.build(place))
    assert result["code"] == EXIT_CODES["load"], result
    check_manners(result, attack, idle, torch_seconds)
    assert attack.fault is not None and attack.fault.name in result["err"]


@pytest.mark.parametrize("attack", [a for a in ATTACKS if a.outcome in ("note", "fine")], ids=lambda a: a.name)
def test_misleading_files_are_reported_and_ignored(
    attack: Attack, place: Path, run: Run, idle: dict[str, Any], torch_seconds: float
) -> None:
    """Stray and stale files make ``inspect`` print a note that names them, and its exit code stays 0."""
    result = run("inspect", attack.build(place))
    assert result["code"] == 0, result
    check_manners(result, attack, idle, torch_seconds)
    assert not (place / "executed").exists()
    if attack.fault is not None:
        assert f"note: {attack.fault.name}" in result["out"], result["out"]
        assert (attack.file or "") in result["out"] and (attack.tensor or "") in result["out"]
