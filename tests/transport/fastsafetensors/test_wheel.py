"""Contracts with the installed wheel: what its parts deliver for chunks, held against the files' bytes.

They fail where the wheel is missing; what it is expected to be able to do is in test_probe.py.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from pathlib import Path

import fastsafetensors
import pytest
import torch
from safetensors.torch import save_file

from rtp_llm.checkpoint import read_catalog
from rtp_llm.config.load import StackedMode
from rtp_llm.errors import TransportError
from rtp_llm.plan.boxes import Box, view
from rtp_llm.plan.ops import Deinterleave, Op, Transpose
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport import pagecache
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, ReaderContext
from rtp_llm.transport.fastsafetensors.failure import FailureDiagnoser, FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.local import LocalTransport, open_chunks
from rtp_llm.transport.fastsafetensors.sequence import Split, local_chunks, splits
from rtp_llm.transport.interface import NoProgress, TransferStats
from tests.transport.fastsafetensors.plans import Collect, everything, plan_for, rows_of, save_every_dtype

CPU = torch.device("cpu")
NOGDS = EffectiveConfig(copier="nogds")


def reader_context(directory: Path, config: EffectiveConfig = NOGDS, direct: dict[str, bool] | None = None) -> ReaderContext:
    return ReaderContext(str(directory), CPU, config, 2, direct or {})


def deliver(plan: LoadPlan, directory: Path, chunk_bytes: int, config: EffectiveConfig = NOGDS) -> tuple[Collect, TransferStats]:
    sink = Collect(plan)
    transport = LocalTransport(reader_context(directory, config), local_chunks(plan, StackedMode.PER_EXPERT, chunk_bytes))
    moved = transport.deliver(plan, sink, NoProgress(), lambda: None)
    assert moved.bytes_placed == plan.bytes_read
    return sink, moved


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("queue_size", [-1, 0, 2])
@pytest.mark.parametrize("chunk_bytes", [1, 100, 1000, 1 << 20])
def test_every_dtype_through_chunks_of_any_size(tmp_path: Path, chunk_bytes: int, queue_size: int) -> None:
    """Tensors beyond one chunk, several in one, dtypes that the wheel does not know, odd sizes, scalars, empties: bit for bit,
    each byte read once."""
    tensors = save_every_dtype(tmp_path)
    plan = plan_for(tmp_path, everything)
    sink, moved = deliver(plan, tmp_path, chunk_bytes, EffectiveConfig(copier="nogds", queue_size=queue_size))
    for name, tensor in tensors.items():
        assert sink.memory[name].dtype == tensor.dtype and bits(sink.memory[name]) == bits(tensor), name
    chunks = local_chunks(plan, StackedMode.PER_EXPERT, chunk_bytes)
    assert moved.bytes_read == sum(chunk.nbytes for chunk in chunks) <= plan.bytes_read + 16 * len(chunks)


@pytest.mark.parametrize("ops", [(), (Transpose(),), (Deinterleave(2),)])
def test_boxes_and_ops(tmp_path: Path, ops: tuple[Op, ...]) -> None:
    """Rows, columns and inner boxes, through an op that passes boxes and one that needs the whole."""
    tensors = {name: torch.randn(12, 10) for name in ("rows", "columns", "inner", "all")}
    save_file(tensors, tmp_path / "model.safetensors")
    full = (10, 12) if ops == (Transpose(),) else (12, 10)
    boxes: dict[str, Box] = {
        "rows": ((3, 7), (0, full[1])),
        "columns": ((0, full[0]), (5, 10)),
        "inner": ((1, 9), (2, 3)),
        "all": ((0, full[0]), (0, full[1])),
    }
    plan = plan_for(tmp_path, lambda info: boxes[info.name], ops)
    for chunk_bytes in (40, 200, 1 << 20):
        sink, _ = deliver(plan, tmp_path, chunk_bytes)
        for name, raw in tensors.items():
            slot = ops[0].apply(raw) if ops else raw
            assert torch.equal(sink.memory[name], view(slot, boxes[name])), name


def test_only_the_ranks_rows_are_read(tmp_path: Path) -> None:
    """Half of a tensor is half of its bytes, not the whole and a filter."""
    save_file({"a": torch.randn(1 << 12, 128), "b": torch.randn(1 << 12, 128)}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, rows_of(1, 2))
    _, moved = deliver(plan, tmp_path, 1 << 20)
    wanted = 2 * (1 << 11) * 128 * 4
    assert plan.bytes_read == wanted and wanted <= moved.bytes_read <= wanted + 4 * 16  # chunks begin at multiples of 16


def test_small_gaps_are_read_along_and_large_ones_are_not(tmp_path: Path) -> None:
    """Unwanted tensors between wanted ones cost a read where they are small, and a new chunk where they are large."""
    save_file(
        {"a": torch.randn(9), "b": torch.randn(30), "c": torch.randn(9), "d": torch.randn(1 << 19), "e": torch.randn(9)},
        tmp_path / "m.safetensors",
    )
    tensors = {t.name: t for t in read_catalog(tmp_path).tensors}
    wanted = {"a", "c", "e"}
    plan = plan_for(tmp_path, lambda info: ((0, info.shape[0] if info.name in wanted else 0),))
    ordered = sorted(tensors.values(), key=lambda t: t.start)
    chunks = local_chunks(plan, StackedMode.PER_EXPERT, 1 << 24)
    far = [t.name for t in ordered].index("d") not in (0, 4)
    assert len(chunks) == (2 if far else 1)
    sink, _ = deliver(plan, tmp_path, 1 << 24)
    assert all(sink.memory[name].numel() == (9 if name in wanted else 0) for name in tensors)


def test_odd_header_lengths(tmp_path: Path) -> None:
    """A header that ends at an odd byte puts all tensors at odd addresses: values are right nevertheless."""
    data = torch.arange(40, dtype=torch.float64)
    header = {"a": {"dtype": "F64", "shape": [4, 10], "data_offsets": [0, 320]}}
    text = json.dumps(header).encode()
    text += b" " * (1 - len(text) % 2 + 2)
    assert len(text) % 2
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data.numpy().tobytes())
    sink, _ = deliver(plan_for(tmp_path, everything), tmp_path, 1 << 20)
    assert torch.equal(sink.memory["a"].reshape(-1), data)


def test_nothing_is_left(tmp_path: Path) -> None:
    """After a load, and after one that is stopped in the middle: no buffer, no thread, no descriptor, and borrowed tensors
    pin nothing."""
    save_every_dtype(tmp_path)
    plan = plan_for(tmp_path, everything)
    deliver(plan, tmp_path, 100)

    class Stop(Exception):
        pass

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stop

    for _ in range(2):
        calls: list[int] = []
        transport = LocalTransport(reader_context(tmp_path), local_chunks(plan, StackedMode.PER_EXPERT, 100))
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(Stop):
            transport.deliver(plan, Collect(plan), NoProgress(), stop)
        gc.collect()
        assert fastsafetensors.live_allocation_count() == 0
        assert not [t for t in threading.enumerate() if "_producer_worker" in t.name]
    assert len(os.listdir("/proc/self/fd")) <= len(before)


def test_nothing_is_said_on_stdout(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not in a load, and not in one that fails: a program reads JSON there."""
    save_every_dtype(tmp_path)
    plan = plan_for(tmp_path, everything)
    deliver(plan, tmp_path, 100)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(TransportError):
        deliver(plan, tmp_path, 100)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("harm", "fault"), [("gone", "IO_ERROR"), ("shorter", "FILE_CHANGED"), ("longer", "FILE_CHANGED")])
def test_a_data_error_is_one(tmp_path: Path, harm: str, fault: str) -> None:
    """A file that is not what its header was read from: an error that names it, and no failure of the package."""
    save_every_dtype(tmp_path)
    plan = plan_for(tmp_path, everything)
    file = tmp_path / "model-00002-of-00003.safetensors"
    if harm == "gone":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size + (-9 if harm == "shorter" else 9))
    with pytest.raises(TransportError, match=rf"{fault}.*model-00002-of-00003"):
        deliver(plan, tmp_path, 100)


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """What the wheel reports as a failed read is found in the file: expected and actual length."""
    save_file({"a": torch.zeros(1 << 20)}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, everything)
    chunks = local_chunks(plan, StackedMode.PER_EXPERT, 1 << 23)
    diagnoser = FailureDiagnoser(str(tmp_path), plan.catalog.files)
    diagnoser.about(chunks[0])
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(TransportError, match=r"FILE_CHANGED.*found 1000 bytes"), diagnoser.watching():
        raise RuntimeError("wait_nogds_read failed")


def test_a_failure_with_sound_files_is_the_packages(tmp_path: Path) -> None:
    """And holds no reference to what it raised."""
    save_file({"a": torch.zeros(9)}, tmp_path / "model.safetensors")
    plan = plan_for(tmp_path, everything)
    diagnoser = FailureDiagnoser(str(tmp_path), plan.catalog.files)
    diagnoser.about(local_chunks(plan, StackedMode.PER_EXPERT, 1 << 20)[0])
    with pytest.raises(FastsafetensorsFailure, match="RuntimeError: undefined symbol"), diagnoser.watching():
        raise RuntimeError("undefined symbol: cuFileRead")


@pytest.mark.parametrize("direct", [True, False])
def test_direct_reads_leave_the_page_cache_alone(tmp_path: Path, direct: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice for each file reaches the descriptor: buffered reads fill the cache, direct ones do not."""
    monkeypatch.delenv("FASTSAFETENSORS_ODIRECT", raising=False)
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(1 << 21)}, file)
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = file.stat().st_size
    plan = plan_for(tmp_path, everything)
    if pagecache.cached_bytes(file) == size:
        pytest.fail("this file system keeps what it was told to drop: run the tests with TMPDIR on a disk")
    chunks = local_chunks(plan, StackedMode.PER_EXPERT, 1 << 20)
    reader = open_chunks(
        reader_context(tmp_path, direct={file.name: direct}), chunks, FailureDiagnoser(str(tmp_path), plan.catalog.files), overlap=True
    )
    while reader.next() is not None:
        pass
    reader.close()
    cached = pagecache.cached_bytes(file)
    assert cached is not None and (cached < size // 2 if direct else cached > size // 2)


def test_stacked_tensors_are_cut_between_experts(tmp_path: Path) -> None:
    """Pieces of stacked tensors are single experts, in messages of their own for a group; whole in full-stacked mode."""
    from rtp_llm import LoadConfig, ParallelConfig, build_plan
    from rtp_llm.transport.fastsafetensors.sequence import group_order
    from tests.transport.fastsafetensors.workers import save_moe

    directory = save_moe(tmp_path / "moe", published=False)
    plan = build_plan(directory, ParallelConfig(ep_size=2, ep_rank=1), LoadConfig(device="cpu"))
    kinds = splits(plan.slots, StackedMode.PER_EXPERT)
    stacked = {name for name, kind in kinds.items() if kind is Split.EXPERTS}
    assert stacked and all("experts" in name for name in stacked)
    order = group_order(plan, StackedMode.PER_EXPERT, 1 << 20, 2)
    parts = [m for _, chunk in order for m in chunk.messages if m.pieces[0].tensor.name in stacked]
    assert all(len(m.pieces) == 1 and m.pieces[0].box[0][1] - m.pieces[0].box[0][0] == 1 for m in parts)
    assert len(parts) == sum(t.shape[0] for t in plan.catalog.tensors if t.name in stacked)
    whole = group_order(plan, StackedMode.FULL_STACKED, 1 << 20, 2)
    pieces = [p for _, chunk in whole for m in chunk.messages for p in m.pieces if p.tensor.name in stacked]
    assert len(pieces) == len(stacked)
    local = [p for chunk in local_chunks(plan, StackedMode.PER_EXPERT, 1 << 20) for m in chunk.messages for p in m.pieces]
    assert {p.box[0][0] for p in local if p.tensor.name in stacked} == set(plan.model.experts[0].held[1])
