"""What ranks do in the tests of this folder; each function runs in processes of its own."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rtp_llm import ParallelConfig, export_checkpoint, load_model
from rtp_llm.config import LoadConfig
from rtp_llm.errors import CheckpointError, ParallelError, RtpLlmError
from rtp_llm.parallel.world import World, agree, join_world
from rtp_llm.transport.scratch.files import Files

SETTINGS = LoadConfig(device="cpu", timeout_s=60.0)


def joined() -> World:
    return join_world(os.environ, "cpu", 60.0)


def gather(payloads: list[bytes]) -> list[bytes]:
    world = joined()
    with world.watch() as watch:
        assert watch.exchange(b"first") == [b"first"] * world.size
        return watch.exchange(payloads[world.rank])


def agreed(lines: list[list[str]]) -> str:
    world = joined()
    mine = lines[world.rank]
    with world.watch() as watch:
        agree(watch, "\n".join(mine), lambda: iter(mine))
    return "agreed"


def load(paths: list[str], settings: LoadConfig = SETTINGS) -> int:
    """A load as users do it; the path may differ between ranks."""
    return load_model(paths[int(os.environ["RANK"])], load=settings).report.bytes_read


def say(error: RtpLlmError) -> None:
    print(error, file=sys.stderr)
    raise SystemExit(2) from error


def load_or_say(paths: list[str]) -> None:
    try:
        load(paths)
    except RtpLlmError as error:
        say(error)


def held() -> tuple[int, int]:
    """Threads and open sockets of this process."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the listing's own
            links.append(os.readlink(fd))
    return len(os.listdir("/proc/self/task")), sum(link.startswith("socket:") for link in links)


def held_after(times: int, directories: list[str], ep_size: int, out: str, settings: dict[str, Any]) -> list[tuple[int, int]]:
    """What is held after each of ``times`` loads, of this rank's directory; each is run, and exported to ``out``, where it succeeds."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tp_size = size // ep_size
    place = ParallelConfig(tp_size, rank % tp_size, ep_size, rank // tp_size)
    found, models = [], []
    for number in range(times):
        try:
            loaded = load_model(directories[rank], parallel=place, load=replace(SETTINGS, **settings))
            loaded.model(torch.tensor([[1, 2, 3]]))
            models.append(loaded)  # whoever keeps models keeps no groups
            export_checkpoint(loaded, Path(out, str(number)))
        except CheckpointError:  # this rank's own
            pass
        except ParallelError as error:  # another one's
            assert "RANK_LOST" not in str(error), error
        found.append(held())
    return found


class DyingFiles(Files):
    """Reads that end rank 2, in one of the ways in which ranks end."""

    way = ""

    def scatter(self, *args: object) -> None:
        if os.environ["RANK"] == "2":
            if self.way == "frozen":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.way == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.way == "defect":
                raise ZeroDivisionError("a defect")
        super().scatter(*args)  # type: ignore[arg-type]


def load_while_one_dies(path: str, way: str, timeout_s: float) -> None:
    """Rank 2 dies at its first read; the others say why they have ended."""
    from rtp_llm.transport.scratch import reader

    DyingFiles.way = way
    reader.Files = DyingFiles  # type: ignore[misc]
    try:
        load([path] * 4, replace(SETTINGS, timeout_s=timeout_s))
    except RtpLlmError as error:
        say(error)


def answer_while_one_dies(path: str) -> None:
    """Rank 1 is killed between two forward passes."""
    model = load_model(path, load=SETTINGS).model
    model(torch.tensor([[1, 2, 3]]))
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            model(torch.tensor([[1, 2, 3]]))
    except RtpLlmError as error:
        say(error)
