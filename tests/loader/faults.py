"""Loads that come to harm on the way, one after another in one process: ``python -m tests.loader.faults CKPT``.

Prints one JSON object: for each harm the error, and what of the load was left afterwards.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import RtpLlmError
from rtp_llm.loader import load as loading

_THREADS = 3
#: Reads before the harm: most of the work is still to do.
_BEFORE = 8


@contextmanager
def at_a_read(harm: Callable[[], None]) -> Iterator[None]:
    """``harm`` happens in a reader thread, once, when all of them have the file open and have read a little."""
    read, begun, calls = os.preadv, threading.Barrier(_THREADS), []
    mine = threading.local()

    def preadv(*args: Any) -> int:
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
def little_memory(share: float) -> Iterator[None]:
    """While parameters are allocated the kernel gives this process no more than ``share`` of what they need."""
    allocate = loading.allocate

    def limited(model: nn.Module, plan: Any, device: torch.device) -> Any:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size + int(share * plan.bytes_resident), before[1]))
        try:
            return allocate(model, plan, device)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, before)

    loading.allocate = limited
    try:
        yield
    finally:
        loading.allocate = allocate


def left() -> dict[str, Any]:
    """What is there of a load: threads, open files of the checkpoint, parameters with memory."""
    gc.collect()
    return {
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("rtp_llm")],
        "files": [link for fd in Path("/proc/self/fd").iterdir() if (link := _target(fd)).endswith(".safetensors")],
        "parameters": sum(isinstance(o, nn.Parameter) and not o.is_meta for o in gc.get_objects()),
    }


def _target(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:  # the listing's own
        return ""


def tried(directory: Path) -> dict[str, Any]:
    try:
        load_model(directory, load=LoadConfig(device="cpu", reader_threads=_THREADS, buffer_mib=1))
    except RtpLlmError as error:
        return {"error": error.problems[0].code, "file": error.problems[0].file, "text": str(error)}
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test says whether it may be
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None}


def main(directory: Path) -> dict[str, dict[str, Any]]:
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
            found[name] = tried(directory)
        found[name] |= left()
    file.write_bytes(whole)
    loaded = load_model(directory, load=LoadConfig(device="cpu", verify=True))
    found["afterwards"] = {"verified": loaded.report.verified}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
