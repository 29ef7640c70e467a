"""Runs of a file out of the page cache: right bytes and no others; and whatever goes wrong is left to a read to tell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rtp_llm.transport.scratch import gather
from rtp_llm.transport.scratch.gather import Mapped
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


@pytest.mark.parametrize("call", [lambda *_: -1, None])
def test_a_kernel_without_the_call(mapped: Mapped, monkeypatch: pytest.MonkeyPatch, call: object) -> None:
    """It is not there, or a container's rules refuse it."""
    monkeypatch.setattr(mapped, "_call", call)
    assert not mapped.gather(0, 8192, 4096, memoryview(bytearray(4096)))


def test_what_is_not_cached_is_read(mapped: Mapped, tmp_path: Path) -> None:
    """Anywhere in the stretch: at its ends, or between them."""
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
