"""What is read together: few calls, bounded unwanted bytes, right bytes whatever the kernel returns."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_llm.plan.boxes import Box, view
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.interface import Memory, Place
from rtp_llm.transport.scratch import reader
from rtp_llm.transport.scratch.blocks import MAX_BATCH, MAX_RUNS, Block, ContiguousRead, ReadBatch, StridedRead, Work, spans_of, work_of
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.scatter import scatter
from rtp_llm.transport.scratch.staging import Staging
from tests.transport.test_scratch import Collect, deliver, plan_for

MIB = 1 << 20


class Calls:
    """os.preadv, counted, and cut short to at most ``most`` bytes a call, of a file system that does not tell what is cached: so nothing
    is gathered out of a map."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.sizes: list[int] = []
        self._most, self._preadv = most, os.preadv

    def __call__(self, descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        left, cut = self._most, []
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= len(cut[-1])
        self.sizes.append(self._preadv(descriptor, cut, offset))
        return self.sizes[-1]


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, Box]:
    return {name: tuple((0, n) for n in t.shape) for name, t in tensors.items()}


def test_small_neighbours_are_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand small tensors that lie side by side take two calls, and nothing else is read."""
    tensors = {f"t{i:04}": torch.full((7,), float(i)) for i in range(1000)}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, whole(tensors))
    calls = Calls()
    monkeypatch.setattr(os, "preadv", calls)
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, MIB, threads=1)
    assert len(calls.sizes) == -(-1000 // MAX_RUNS)
    assert moved.bytes_read == moved.bytes_placed == sum(calls.sizes) == 1000 * 28
    assert all(torch.equal(sink.memory[name], t) for name, t in tensors.items())


def test_columns_are_read_by_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The right half of 2,000 rows: one call for 512 rows; what lies between is read and counted, before and after it is not."""
    tensor = torch.randn(2000, 64)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, {"t": ((0, 2000), (32, 64))})
    calls = Calls()
    monkeypatch.setattr(os, "preadv", calls)
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, MIB, threads=1)
    assert torch.equal(sink.memory["t"], tensor[:, 32:])
    assert len(calls.sizes) == 4
    assert moved.bytes_placed == plan.bytes_read == 2000 * 128
    assert moved.bytes_read == sum(calls.sizes) == 2000 * 128 + (2000 - 4) * 128


@pytest.mark.parametrize("gap", [0, 199, 200])
def test_how_wide_a_gap_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: int) -> None:
    """Columns whose rows are 200 bytes apart: with a smaller limit they cost a call each, and no byte more than the plan says."""
    tensor = torch.randn(5, 60)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, {"t": ((0, 5), (0, 10))})
    calls = Calls()
    monkeypatch.setattr(os, "preadv", calls)
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, MIB, threads=1, most_gap=gap)
    assert torch.equal(sink.memory["t"], tensor[:, :10])
    assert moved.bytes_read == sum(calls.sizes) == 5 * 40 + (4 * 200 if gap == 200 else 0)
    assert len(calls.sizes) == (1 if gap == 200 else 5)


def test_other_tensors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other tensor of a file, as a rank wants its experts: what lies between is read only up to 2 % of what is wanted."""
    tensors = {f"t{i:02}": torch.randn(100 if i % 2 else 1 + i) for i in range(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    boxes = {name: ((0, len(t)),) if len(t) == 100 else ((0, 0),) for name, t in tensors.items()}
    plan = plan_for(tmp_path, boxes)
    calls = Calls()
    monkeypatch.setattr(os, "preadv", calls)
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, MIB, threads=1)
    assert all(torch.equal(sink.memory[name], t) for name, t in tensors.items() if len(t) == 100)
    assert sum(calls.sizes) == moved.bytes_read <= 1.02 * plan.bytes_read
    assert 1 < len(calls.sizes) < 20  # the narrow gaps are read past, the wide ones are not


@pytest.mark.parametrize("most", [1, 7, 100])
def test_calls_that_the_kernel_cuts_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A call may return fewer bytes than it was asked for, anywhere in its buffers: the rest is read by the next."""
    tensors = {"a": torch.randn(6, 4), "b": torch.randn(5), "c": torch.randn(())}
    save_file(tensors, tmp_path / "model.safetensors")
    boxes = whole(tensors) | {"a": ((0, 6), (1, 3))}
    plan = plan_for(tmp_path, boxes)
    monkeypatch.setattr(os, "preadv", Calls(most))
    sink = Collect(plan, direct=True)
    deliver(plan, tmp_path, sink, MIB)
    assert all(torch.equal(sink.memory[name], view(t, boxes[name]) if boxes[name] else t) for name, t in tensors.items())


def staged(piece: Work) -> int:
    """Bytes of a staging buffer that a piece of work needs."""
    if isinstance(piece, Block):
        return piece.staged
    return sum(spans_of(part.nbytes for part in piece.pieces)[-1]) if isinstance(piece, ReadBatch) else piece.nbytes


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("most", [256, 1000, 100_000])
@pytest.mark.parametrize("gap", [0, 1 << 17])
def test_work_fits_the_staging_buffer(tmp_path: Path, direct: bool, most: int, gap: int) -> None:
    """Whatever its kind, a piece of work needs no more than the buffer (padding for alignment included), and together the
    pieces are what the plan reads."""
    tensors = {f"t{i:03}": torch.zeros(1 + i % 50) for i in range(300)} | {"big": torch.zeros(40, 30), "columns": torch.zeros(40, 30)}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, whole(tensors) | {"columns": ((0, 40), (3, 13))})
    found = list(work_of(plan, Collect(plan, direct).direct, most, gap))
    assert all(staged(piece) <= most for piece in found)
    assert sum(piece.nbytes for piece in found) == plan.bytes_read
    kinds = {type(piece) for work in found for piece in (work.pieces if isinstance(work, ReadBatch) else (work,))}
    assert Block in kinds and (StridedRead in kinds) == (direct and gap > 0)


class Counted(TorchDispatchMode):
    """Counts what torch is asked to do."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **kwargs or {})


def test_parts_are_scattered_by_few_calls() -> None:
    """Parts for two parameters, in any order, with and without gaps: each to its place and nothing beside it, by one call for each
    parameter and one for all: what a call of torch costs is its turn at the interpreter's lock."""
    a, b = torch.zeros(100, dtype=torch.uint8), torch.zeros(6, 8, dtype=torch.bfloat16)
    memories, wanted = [Memory.of(a), Memory.of(b)], [bytearray(100), bytearray(96)]
    parts = []
    for index, (memory, at, nbytes) in enumerate([(0, 40, 7), (1, 16, 16), (0, 0, 8), (1, 32, 1), (0, 8, 2), (1, 0, 0), (0, 99, 1)]):
        parts.append((Place(memories[memory], at, nbytes), torch.full((nbytes,), index + 1, dtype=torch.uint8)))
        wanted[memory][at : at + nbytes] = bytes([index + 1] * nbytes)
    with Counted() as counted:
        scatter(parts)
    assert bytes(a.numpy()) == wanted[0] and bytes(b.view(torch.uint8).numpy().reshape(-1)) == wanted[1]
    assert counted.calls == 3
    scatter([])


class Device(Collect):
    """A sink whose memory cannot be read into, as a GPU's, in one piece."""

    def __init__(self, plan: LoadPlan, direct: bool) -> None:
        super().__init__(plan, direct)
        flat = torch.cat([memory.reshape(-1) for memory in self.memory.values()])
        sizes = [memory.numel() for memory in self.memory.values()]
        self.memory = {p.name: part.view(p.shape) for p, part in zip(plan.model.params, flat.split_with_sizes(sizes), strict=True)}
        self._all = Memory(flat.view(torch.uint8), None)

    def direct(self, part: Delivery) -> Place | None:
        place = view(self.memory[part.targets[0].param], part.targets[0].box)
        return Place(self._all, 4 * place.storage_offset(), 4 * place.numel())

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        raise AssertionError("all of it has a place")


def test_a_block_is_scattered_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small neighbours for a device: none goes through the sink, and all of a block by one call of :func:`scatter`."""
    tensors = {f"t{i:03}": torch.randn(1 + i % 9, 3) for i in range(400)}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, whole(tensors))
    calls: list[int] = []

    def counted(parts: Sequence[tuple[Place, torch.Tensor]]) -> None:
        calls.append(len(parts))
        scatter(parts)

    monkeypatch.setattr(reader, "scatter", counted)
    sink = Device(plan, direct=True)
    deliver(plan, tmp_path, sink, MIB, threads=1)
    assert calls == [400]
    assert all(torch.equal(sink.memory[name], tensor) for name, tensor in tensors.items())


def scaled(folder: Path, experts: int) -> dict[str, torch.Tensor]:
    """Two files of matrices with small scales between them."""
    for file in range(2):
        tensors = {}
        for expert in range(experts):
            tensors[f"f{file}e{expert:03}.weight"] = torch.randn(64, 128)
            tensors[f"f{file}e{expert:03}.weight_scale"] = torch.randn(8, 16)
        save_file(tensors, folder / f"{file}.safetensors")
    return {name: tensor for file in range(2) for name, tensor in load_file(folder / f"{file}.safetensors").items()}


@pytest.mark.parametrize("box", [((0, 8), (2, 4)), ((2, 4), (0, 16))])
@pytest.mark.parametrize("sink_of", [Collect, Device])
def test_small_pieces_far_apart_share_a_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, box: Box, sink_of: type[Collect]) -> None:
    """A rank's rows or columns of scales between weights: for a device they are staged, and transferred, up to 32 at a time, though each
    is read by a call of its own; on the host they go right to their places.  Batches are of one file, and weights that fill the buffer
    neither join nor part them."""
    tensors = scaled(tmp_path, 50)
    boxes = {name: box if name.endswith("scale") else ((0, 64), (0, 128)) for name in tensors}
    plan = plan_for(tmp_path, boxes)
    sink = sink_of(plan, direct=True)
    work = list(work_of(plan, sink.direct, MIB // 32, MIB))
    batches = [piece for piece in work if isinstance(piece, ReadBatch)]
    assert [len(batch.pieces) for batch in batches] == [MAX_BATCH, 50 - MAX_BATCH] * 2
    assert all(len({piece.file for piece in batch.pieces}) == 1 for batch in batches)
    assert [piece.nbytes for piece in work if isinstance(piece, ContiguousRead)] == [64 * 128 * 4] * 100
    taken: list[int] = []
    take = Staging.take
    monkeypatch.setattr(Staging, "take", lambda self, nbytes: taken.append(nbytes) or take(self, nbytes))
    deliver(plan, tmp_path, sink, MIB // 32)
    assert all(torch.equal(sink.memory[name], view(tensor, boxes[name])) for name, tensor in tensors.items())
    assert len(taken) == (0 if sink_of is Collect else len(work))


@pytest.mark.parametrize(("rows", "columns", "whole"), [(64, 64, True), (64, 65, False)])
def test_small_combs_are_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, whole: bool) -> None:
    """Up to 16 KiB from the first to the last wanted byte: one plain read, of which the runs are kept; what lies between is counted as
    read.  Beyond, the file's map is asked first."""
    tensor = torch.randn(rows, columns)
    save_file({"t": tensor}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, {"t": ((0, rows), (0, columns - 1))})
    asked: list[int] = []
    gather = Files.gather
    monkeypatch.setattr(Files, "gather", lambda self, *given: asked.append(1) or gather(self, *given))
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, MIB)
    assert torch.equal(sink.memory["t"], tensor[:, :-1])
    assert asked == ([] if whole else [1])
    assert moved.bytes_placed == plan.bytes_read and moved.bytes_read == plan.bytes_read + (rows - 1) * 4
