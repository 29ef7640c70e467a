"""Loads that come to harm on the way, one after another in one process: ``python -m tests.loader.faults CKPT DEVICE``.

Prints one JSON object: for each harm the error, and what of the load was left afterwards.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rtp_llm import LoadConfig, load_model
from rtp_llm.bench.synthetic import llama, write_checkpoint
from rtp_llm.errors import RtpLlmError
from rtp_llm.loader.fill import fill as filling
from rtp_llm.transport.scratch import pool
from rtp_llm.transport.scratch.staging import Pinned
from tests.support.paths import child_env

_THREADS = 3
#: Reads before the harm: most of the work is still to do.
_BEFORE = 8


@contextmanager
def at_a_read(harm: Callable[[], None]) -> Iterator[None]:
    """``harm`` happens in a reader thread, once, when all of them have the file open and have read a little."""
    read, begun, calls = os.preadv, threading.Barrier(_THREADS), []
    mine = threading.local()

    def preadv(*args: Any) -> int:
        if len(args) > 3:
            return read(*args)  # only asks whether something is cached
        if not hasattr(mine, "begun"):
            mine.begun = begun.wait(timeout=30)
        calls.append(1)
        if len(calls) == _BEFORE:
            harm()
        return read(*args)

    os.preadv = preadv
    try:
        yield
    finally:
        os.preadv = read


def broken_disk() -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def limit_of_host(nbytes: int) -> Iterator[None]:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextmanager
def limit_of_device(nbytes: int) -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + nbytes) / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


LIMITS = {"cpu": limit_of_host, "cuda": limit_of_device}


@contextmanager
def little_memory(share: float) -> Iterator[None]:
    """While parameters are allocated this process gets no more than ``share`` of what they need."""
    allocate = filling.allocate

    def limited(model: nn.Module, plan: Any, device: torch.device) -> Any:
        with LIMITS[device.type](int(share * plan.bytes_resident)):
            return allocate(model, plan, device)

    filling.allocate = limited
    try:
        yield
    finally:
        filling.allocate = allocate


#: Page-locked memory that has not been given back.
LOCKED: list[Pinned] = []


class Noted(Pinned):
    """Page-locked memory that is noted while it is."""

    def _register(self) -> None:
        super()._register()
        LOCKED.append(self)

    def release(self) -> None:
        super().release()
        if self in LOCKED:
            LOCKED.remove(self)


def left(device: str) -> dict[str, Any]:
    """What is there of a load: threads, open files of the checkpoint, parameters with memory, memory of the device, locked memory."""
    gc.collect()
    return {
        "device_bytes": torch.cuda.memory_allocated() if device == "cuda" else 0,
        "locked": len(LOCKED),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("rtp_llm")],
        "files": [link for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd)).endswith(".safetensors")],
        "parameters": sum(isinstance(o, nn.Parameter) and not o.is_meta for o in gc.get_objects()),
    }


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:  # the listing's own
        return ""


def tried(directory: Path, device: str) -> dict[str, Any]:
    try:
        load_model(directory, load=LoadConfig(device=device, kernels="torch", reader_threads=_THREADS, buffer_mib=1))
    except RtpLlmError as error:
        return {"error": error.problems[0].code, "file": error.problems[0].file, "text": str(error)}
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test says whether it may be
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


def main(directory: Path, device: str) -> dict[str, dict[str, Any]]:
    pool.Pinned = Noted  # type: ignore[misc]
    file = next(directory.glob("*.safetensors"))
    whole = file.read_bytes()
    harms = {
        "parameters": little_memory(0.7),  # the first: later ones could take what earlier ones have freed
        "interrupt": at_a_read(lambda: os.kill(os.getpid(), signal.SIGINT)),
        "disk": at_a_read(broken_disk),
        "host memory": at_a_read(lambda: (_ for _ in ()).throw(MemoryError)),
        "cut": at_a_read(lambda: os.truncate(file, len(whole) - 4096)),
    }
    found = {}
    for name, harm in harms.items():
        with harm:
            found[name] = tried(directory, device)
        found[name] |= left(device)
    file.write_bytes(whole)
    loaded = load_model(directory, load=LoadConfig(device=device, kernels="torch", verify=True))
    found["afterwards"] = {"verified": loaded.report.verified, "locked": len(LOCKED)}
    return found


def in_a_process(directory: Path, device: str) -> dict[str, dict[str, Any]]:
    """All harms in one process of its own: a signal and a limit of memory are a whole process's."""
    write_checkpoint(directory, llama(0.05), shards=1)
    command = [sys.executable, "-m", "tests.loader.faults", str(directory), device]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


#: Each harm with the error that it ends in, and words of its message.
HARMS = [
    ("interrupt", "KeyboardInterrupt", ""),
    ("disk", "IO_ERROR", "Input/output error"),
    ("host memory", "MemoryError", ""),
    ("parameters", "OUT_OF_MEMORY", "no memory for"),
    ("cut", "SHORT_READ", "the file was cut while it was read"),
]


def assert_nothing_left(answer: dict[str, Any], error: str, text: str) -> None:
    """The error says what happened, naming the file, and no thread, open file, half-filled parameter or locked memory is left."""
    assert answer["error"] == error and text in answer["text"], answer
    if error in ("IO_ERROR", "SHORT_READ"):
        assert answer["file"].endswith(".safetensors")
    kept = [answer[name] for name in ("threads", "files", "parameters", "device_bytes", "locked")]
    assert kept == [[], [], 0, 0, 0], answer


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
