"""Runs of a file out of the page cache: right bytes and no others; and whatever goes wrong is left to a read to tell."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rtp_llm.checkpoint import read_catalog
from rtp_llm.errors import TransportError
from rtp_llm.transport.scratch import gather
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.gather import Mapped
from tests.support.paths import child_env
from tests.transport.test_scratch import Collect, deliver, plan_for

SIZE = 3 << 20
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


@pytest.fixture
def content() -> Bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


@pytest.fixture
def mapped(tmp_path: Path, content: Bytes) -> Iterator[Mapped]:
    """The content in a file that has just been written, and so is cached."""
    path = tmp_path / "file"
    content.tofile(path)
    descriptor = os.open(path, os.O_RDONLY)
    with Mapped(descriptor, SIZE) as found:
        yield found
    os.close(descriptor)


@pytest.mark.parametrize("start", [0, 1, 4095, 70_000])
@pytest.mark.parametrize(
    ("count", "length", "stride"), [(1, 10, 20), (5, 4096, 8192), (1024, 3, 700), (1025, 100, 1000), (2500, 512, 1024), (7, 4097, 300_001)]
)
def test_runs(mapped: Mapped, content: Bytes, start: int, count: int, length: int, stride: int) -> None:
    """Any number of runs of any length, anywhere; nothing is written beside them."""
    into = bytearray(b"\x55" * (count * length + 2))
    assert mapped.gather(start, stride, length, memoryview(into)[1:-1])
    wanted = b"".join(content[at : at + length].tobytes() for at in range(start, start + count * stride, stride))
    assert into[1:-1] == wanted and into[0] == into[-1] == 0x55


def test_a_file_that_is_cut(tmp_path: Path, mapped: Mapped) -> None:
    """What a load from the map would kill the process for is an answer here."""
    into = memoryview(bytearray(300 * 4096))
    assert mapped.gather(0, 8192, 4096, into)
    os.truncate(tmp_path / "file", SIZE // 2)
    assert not mapped.gather(0, 8192, 4096, into)
    assert mapped.gather(0, 8192, 4096, into[: 100 * 4096])


@pytest.mark.parametrize("left", [1, 50, 99])
def test_a_file_that_is_cut_at_the_last_moment(tmp_path: Path, mapped: Mapped, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """When its last byte has been asked for and none is copied: the rest of its last page then reads as zeros, and not as an error."""
    call = mapped._call
    assert call is not None

    def cut(*args: int) -> int:
        os.truncate(tmp_path / "file", 9 * 8192 + left)
        return int(call(*args))

    monkeypatch.setattr(mapped, "_call", cut)
    assert not mapped.gather(0, 8192, 100, memoryview(bytearray(10 * 100)))


def test_a_file_that_is_cut_before_it_is_mapped(tmp_path: Path) -> None:
    """It has been open, and read from, for some time: what is told is what a read finds."""
    save_file({"a": torch.randn(600, 64)}, tmp_path / "model.safetensors")
    catalog = read_catalog(tmp_path)
    (tensor,) = catalog.tensors
    into = memoryview(bytearray(600 * 128))
    with Files(str(tmp_path), catalog.files) as files:
        files.scatter(tensor, tensor.start, [into[:10]], 10)
        os.truncate(tmp_path / "model.safetensors", 5000)
        assert not files.gather(tensor, tensor.start, 256, 128, into)
        with pytest.raises(TransportError, match="SHORT_READ"):
            files.read(tensor, memoryview(bytearray(tensor.nbytes)))


def test_what_cannot_be_mapped_is_read(tmp_path: Path) -> None:
    """A process with little address space loads rows of a file that is larger than what is left."""
    tensors = {"a": torch.randn(600, 64), "b": torch.zeros(1 << 24)}
    save_file(tensors, tmp_path / "model.safetensors")
    script = """
import resource, sys
from pathlib import Path
from rtp_llm.checkpoint import read_catalog
from rtp_llm.transport.scratch.files import Files
catalog = read_catalog(sys.argv[1])
tensor = next(t for t in catalog.tensors if t.name == "a")
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held + (32 << 20), resource.getrlimit(resource.RLIMIT_AS)[1]))
into = bytearray(tensor.nbytes)
with Files(sys.argv[1], catalog.files) as files:
    assert not files.gather(tensor, tensor.start, 256, 128, memoryview(into)[: 600 * 128])
    files.read(tensor, memoryview(into))
sys.stdout.buffer.write(into)
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, env=child_env(), capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == tensors["a"].numpy().tobytes()


def test_a_python_that_cannot_ask_for_cached_bytes(mapped: Mapped, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built with a C library without preadv2(2) reads everything."""
    monkeypatch.setattr(gather, "_NOWAIT", None)
    assert not mapped.gather(0, 8192, 4096, memoryview(bytearray(4096)))


@pytest.mark.parametrize("call", [lambda *_: -1, None])
def test_a_kernel_without_the_call(mapped: Mapped, monkeypatch: pytest.MonkeyPatch, call: object) -> None:
    """It is not there, or a container's rules refuse it."""
    monkeypatch.setattr(mapped, "_call", call)
    assert not mapped.gather(0, 8192, 4096, memoryview(bytearray(4096)))


def test_what_is_not_cached_is_read(mapped: Mapped, tmp_path: Path) -> None:
    """Anywhere in the range: at its ends, or between them."""
    into = memoryview(bytearray(100))
    with (tmp_path / "file").open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, SIZE, os.POSIX_FADV_DONTNEED)
        assert not mapped.gather(0, SIZE - 50, 50, into)
        os.pread(file.fileno(), 1, 0)
    assert not mapped.gather(0, SIZE - 50, 50, into)
    assert mapped.gather(0, 100, 50, into)


@pytest.mark.parametrize("direct", [True, False])
def test_the_reader_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Columns of cached matrices cost no byte beside them, whether they go right into a parameter or are placed; read, they do."""
    tensors = {name: torch.randn(600, 64) for name in "ab"}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, dict.fromkeys(tensors, ((0, 600), (16, 48))))
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(gather, "_process_vm_writev", lambda: None)
        sink = Collect(plan, direct=direct)
        moved = deliver(plan, tmp_path, sink, 1 << 20, threads=2)
        assert all(torch.equal(sink.memory[name], tensor[:, 16:48]) for name, tensor in tensors.items())
        assert moved.bytes_placed == 2 * 600 * 128
        assert (moved.bytes_read > moved.bytes_placed) == refused
