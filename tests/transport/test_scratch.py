"""The own reader: right bytes for every shape, dtype and buffer size, in bounded memory, and errors that name file and tensor."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rtp_llm.checkpoint import read_catalog
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.errors import TransportError
from rtp_llm.plan.boxes import Box, view
from rtp_llm.plan.budget import ReaderLimits, transient_bytes
from rtp_llm.plan.ops import Deinterleave, Op, Transpose
from rtp_llm.plan.pieces import ParamSpec, Piece
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.rules import Mapping, Rule
from rtp_llm.transport.interface import Memory, NoProgress, Place, TransferStats
from rtp_llm.transport.scratch.files import Files
from rtp_llm.transport.scratch.reader import ScratchTransport
from tests.support.plans import joined


class Collect:
    """A sink that keeps what it is given, and can ask for bytes directly."""

    def __init__(self, plan: LoadPlan, direct: bool) -> None:
        self.memory = {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in plan.model.params}
        self._direct = direct

    def direct(self, part: Delivery) -> Place | None:
        place = view(self.memory[part.targets[0].param], part.targets[0].box)
        if not self._direct or not part.verbatim or not part.passes or not place.is_contiguous():
            return None
        return Place(Memory.of(place), 0, place.numel() * place.itemsize)

    def stop(self) -> None:
        """Nobody waits here."""

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        for part, content in items:
            self.place(part, content)

    def place(self, part: Delivery, content: torch.Tensor) -> None:
        for target in part.targets:
            view(self.memory[target.param], target.box).copy_(part.source.apply(content, part.slot_box))


def plan_for(directory: Path, boxes: dict[str, Box], ops: tuple[Op, ...] = ()) -> LoadPlan:
    """One parameter a tensor, holding a box of it."""
    catalog = read_catalog(directory)
    catalog.raise_for_problems()
    specs = []
    for info in catalog.tensors:
        shape = info.shape
        for op in ops:
            shape = op.out_shape(shape)
        box = boxes[info.name]
        local = tuple(b - a for a, b in box)
        piece = Piece(info.name, shape, box, tuple((0, n) for n in local))
        specs.append(ParamSpec(info.name, local, str(DTYPES[info.dtype].torch_name), (piece,)))
    mapping = Mapping(tuple(Rule(t.name, t.name, ops) for t in catalog.tensors))
    plan = joined(catalog, mapping, specs)
    plan.raise_for_problems()
    return plan


def deliver(
    plan: LoadPlan,
    directory: Path,
    sink: Collect,
    buffer_bytes: int,
    threads: int = 3,
    check: Callable[[], None] = lambda: None,
    most_gap: int = 1 << 17,
) -> TransferStats:
    return ScratchTransport(str(directory), torch.device("cpu"), ReaderLimits(threads, buffer_bytes, most_gap, 1, 1 << 20)).deliver(
        plan, sink, NoProgress(), check
    )


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("buffer_bytes", [64, 200, 1 << 20])
@pytest.mark.parametrize("ops", [(), (Transpose(),), (Deinterleave(2),)])
def test_every_box_arrives(tmp_path: Path, direct: bool, buffer_bytes: int, ops: tuple[Op, ...]) -> None:
    """Rows, columns, inner boxes and whole tensors, in parts of any size, through ops that pass boxes and one that does not."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(12, 10) for name in ("rows", "columns", "inner", "all")}
    save_file(tensors, tmp_path / "model.safetensors")
    full = (10, 12) if ops == (Transpose(),) else (12, 10)
    boxes: dict[str, Box] = {
        "rows": ((3, 7), (0, full[1])),
        "columns": ((0, full[0]), (5, 10)),
        "inner": ((1, 9), (2, 3)),
        "all": ((0, full[0]), (0, full[1])),
    }
    plan = plan_for(tmp_path, boxes, ops)
    sink = Collect(plan, direct)
    moved = deliver(plan, tmp_path, sink, buffer_bytes)
    for name, raw in tensors.items():
        slot = raw
        for op in ops:
            slot = op.apply(slot)
        assert torch.equal(sink.memory[name], view(slot, boxes[name])), name
    assert moved.bytes_placed == plan.bytes_read
    assert moved.bytes_read >= moved.bytes_placed
    if not isinstance(ops[:1] and ops[0], Deinterleave):
        assert moved.slow_path == 0
    else:
        assert moved.slow_path == 3  # all but the one that is wanted whole


def test_every_dtype_scalars_and_empties(tmp_path: Path) -> None:
    """Bits of every dtype that torch and safetensors share arrive as they are; so do scalars and empty tensors."""
    torch.manual_seed(0)
    tensors = {}
    for info in DTYPES.values():
        if info.torch_name and info.packed == 1 and hasattr(torch, info.torch_name):
            raw = torch.randint(0, 2 if info.name == "BOOL" else 256, (15, info.bits // 8), dtype=torch.uint8)
            tensors[info.name] = raw.view(getattr(torch, info.torch_name)).reshape(3, 5)
    tensors["scalar"] = torch.tensor(3.5)
    tensors["empty"] = torch.empty(0, 7)
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, {name: tuple((0, n) for n in t.shape) for name, t in tensors.items()})
    for direct in (True, False):
        sink = Collect(plan, direct)
        deliver(plan, tmp_path, sink, 16)
        for name, tensor in tensors.items():
            got = sink.memory[name]
            assert got.dtype == tensor.dtype
            assert torch.equal(got.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    assert len(tensors) >= 18


def test_torch_files_are_read_by_range(tmp_path: Path) -> None:
    """A ``.bin`` file serves boxes like any other; a transposed tensor in it is read whole, counted, and right."""
    torch.manual_seed(0)
    tensors = {"plain": torch.randn(6, 4), "turned": torch.randn(4, 6).t(), "scalar": torch.tensor(2.0)}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    boxes: dict[str, Box] = {"plain": ((2, 4), (0, 4)), "turned": ((0, 6), (1, 3)), "scalar": ()}
    plan = plan_for(tmp_path, boxes)
    sink = Collect(plan, direct=True)
    moved = deliver(plan, tmp_path, sink, 32)
    for name, tensor in tensors.items():
        assert torch.equal(sink.memory[name], view(tensor, boxes[name]) if boxes[name] else tensor), name
    assert moved.slow_path == 1
    assert moved.bytes_placed == 2 * 4 * 4 + 6 * 4 * 4 + 4


def whole_plan(directory: Path, rows: int = 64) -> LoadPlan:
    save_file({f"t{i}": torch.zeros(rows, 16) for i in range(8)}, directory / "model.safetensors")
    return plan_for(directory, {f"t{i}": ((0, rows), (0, 16)) for i in range(8)})


def test_a_file_that_was_cut_after_its_header_was_read(tmp_path: Path) -> None:
    """Seen when it is opened: file, old and new size; nothing is read."""
    plan = whole_plan(tmp_path)
    size = os.path.getsize(tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", size - 100)
    with pytest.raises(TransportError, match=f"FILE_CHANGED.*model.safetensors.*expected {size} bytes, found {size - 100} bytes"):
        deliver(plan, tmp_path, Collect(plan, True), 1024)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """A short read names file, tensor, expected and actual end; it is no crash and no zeros."""
    plan = whole_plan(tmp_path)
    size = os.path.getsize(tmp_path / "model.safetensors")
    cut = threading.Event()

    def check() -> None:
        if not cut.is_set():
            cut.set()
            return
        os.truncate(tmp_path / "model.safetensors", size - 100)

    with pytest.raises(TransportError, match=rf"SHORT_READ.*model.safetensors, tensor t7.*found {size - 100} bytes"):
        deliver(plan, tmp_path, Collect(plan, True), 512, threads=1, check=check)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    """An error of the operating system names the file and says what the system said."""
    plan = whole_plan(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(TransportError, match=r"IO_ERROR.*No such file.*file model.safetensors"):
        deliver(plan, tmp_path, Collect(plan, True), 512)


def test_the_first_error_ends_all_threads(tmp_path: Path) -> None:
    """What ``check`` raises in one thread is what the caller gets, and the others stop at their next part."""
    plan = whole_plan(tmp_path, rows=4096)
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 5:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        deliver(plan, tmp_path, Collect(plan, True), 256, threads=4, check=check)
    assert len(calls) < 200  # of 8,192 parts
    assert not [t for t in threading.enumerate() if t.name.startswith("rtp_llm-read")]


def test_many_files_need_few_descriptors(tmp_path: Path) -> None:
    """However many shards there are, a thread has one of them open."""
    for i in range(60):
        save_file({f"t{i:02}": torch.full((4,), float(i))}, tmp_path / f"model-{i + 1:05}-of-00060.safetensors")
    plan = plan_for(tmp_path, {f"t{i:02}": ((0, 4),) for i in range(60)})
    before, seen = len(os.listdir("/proc/self/fd")), []
    sink = Collect(plan, True)
    deliver(plan, tmp_path, sink, 512, threads=3, check=lambda: seen.append(len(os.listdir("/proc/self/fd"))))
    assert all(sink.memory[f"t{i:02}"].tolist() == [i] * 4 for i in range(60))
    assert len(seen) == 60 and max(seen) <= before + 2 * 3  # a file and, while looking, the listing itself


def test_one_tensor_at_a_time_is_held_whole(tmp_path: Path) -> None:
    """Tensors that cannot be read in parts are larger than the buffers: threads hold one between them, as the plan counts."""
    tensors = {f"t{i}": torch.randn(64, 64) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, dict.fromkeys(tensors, ((0, 64), (0, 64))), (Deinterleave(2),))
    holding, most = [], []

    class Slow(Collect):
        def place(self, part: Delivery, content: torch.Tensor) -> None:
            holding.append(part)
            most.append(len(holding))
            time.sleep(0.01)
            super().place(part, content)
            holding.pop()

    sink = Slow(plan, True)
    deliver(plan, tmp_path, sink, 1024, threads=4)
    assert max(most) == 1 and len(most) == 8
    assert transient_bytes(plan.deliveries) == 2 * 64 * 64 * 4
    assert all(torch.equal(sink.memory[name], Deinterleave(2).apply(t)) for name, t in tensors.items())


def test_files_are_closed(tmp_path: Path) -> None:
    """No descriptor is left open after a load, nor after one that failed."""
    plan = whole_plan(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    deliver(plan, tmp_path, Collect(plan, True), 512)
    with pytest.raises(KeyError), Files(str(tmp_path), plan.catalog.files) as files:
        files.scatter(plan.catalog.tensors[0], plan.catalog.tensors[0].start, [memoryview(bytearray(4))], 4)
        raise KeyError
    assert len(os.listdir("/proc/self/fd")) == before
