"""How FP8 is made while loading: in bands, by few operations without a wait, in memory that is known before."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_llm import LoadConfig, ParallelConfig, build_plan, load_model
from rtp_llm.loader.context import reader_limits, step_bytes
from rtp_llm.loader.fill.derive import DerivingPlacement, Stopped
from rtp_llm.loader.fill.placement import allocate
from rtp_llm.loader.prepare import Prepared
from rtp_llm.plan.boxes import Box, volume
from rtp_llm.plan.budget import ReaderLimits, StagingLimits, held_bytes, staging_limits
from rtp_llm.plan.derived import DerivedTensor
from rtp_llm.plan.plan import Delivery
from rtp_llm.quantization.scaled import Grid
from rtp_llm.transport.interface import NoProgress
from rtp_llm.transport.scratch.reader import ScratchTransport
from tests.quantization.grids import on
from tests.quantization.test_inline import GRIDS, check_codes, reference
from tests.support.plans import budget_of, prepared
from tests.support.tiny import save_tiny_llama

MIB = 2**20


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose gate, up and down have 17 million elements: more than one band."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    sizes = {"hidden_size": 512, "intermediate_size": 33024, "num_hidden_layers": 1, "num_attention_heads": 8, "vocab_size": 256}
    return save_tiny_llama(folder, dtype=torch.bfloat16, num_key_value_heads=2, **sizes)


@pytest.mark.parametrize("grid", ["channel", "block"])
def test_bands(grid: str, wide: Path) -> None:
    """A matrix of several bands has the codes and scales of the whole, also in shards whose ends lie within a block; and less than
    the whole is on its way."""
    tensors = load_file(wide / "model.safetensors")
    load = LoadConfig(device="cpu", quantization=f"inline-fp8-{grid}", verify=True, reader_threads=2)
    for place in (ParallelConfig(), ParallelConfig(tp_size=8, tp_rank=3)):
        loaded = load_model(wide, parallel=place, load=load)
        assert check_codes(loaded, tensors, grid) == 7
        largest = max(t.nbytes for t in loaded.plan.catalog.tensors)
        assert loaded.report.budget.derived < 2 * largest + 4 * MIB + 2 * load.buffer_mib * MIB
        if place.tp_size == 1:
            assert len(loaded.plan.derived) > 7, "there is one band"


class Counting(TorchDispatchMode):
    """Operations that compute or move something, views apart."""

    VIEWS = ("view", "slice", "select", "unsqueeze", "reshape", "expand", "alias", "empty", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not name.startswith(self.VIEWS):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("grid", "most"), [("tensor", 18), ("channel", 18), ((128, 128), 20)])
def test_a_handful_of_operations(grid: Grid, most: int) -> None:
    """Whatever the number of rows and blocks, the operations of a matrix that fits a step are as many as of the smallest; none of them
    waits for a device (which reading a number does)."""
    counts = []
    for shape in ((256, 256), (2048, 1024)):
        transform, content, region, places = on(shape, grid)
        with Counting() as counting:
            transform.derive(content, region, places, 64 * MIB)
        assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "equal"} & set(counting.names)
        counts.append(len(counting.names))
    assert counts[0] == counts[1] <= most, counting.names


@pytest.mark.parametrize("step", [MIB, 4 * MIB])
@pytest.mark.parametrize("shape", [(1024, 1024), (1000, 1030), (3, 70000)])
@pytest.mark.parametrize("grid", ["tensor", "channel", (128, 128)])
def test_working_memory(grid: Grid, shape: tuple[int, int], step: int) -> None:
    """torch's own record of allocations: making takes no more than is said, and that is no exaggeration."""
    transform, content, region, places = on(shape, grid)
    transform.derive(content, region, places, step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        transform.derive(content, region, places, step)
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    assert 0.5 * transform.working_bytes(region, step) < most <= transform.working_bytes(region, step)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
@pytest.mark.parametrize("grid", ["tensor", "channel", (128, 128)])
def test_other_stored_types(grid: Grid, dtype: torch.dtype) -> None:
    """Codes come from the stored value in float32, whatever type it is stored in; the largest are at the end of E4M3's range."""
    transform, content, region, places = on((300, 200), grid)
    content = content.to(dtype) * 1e-3
    transform.derive(content, region, places, MIB)
    codes, scale = reference(content, grid if isinstance(grid, str) else "block")
    assert torch.equal(places[0][2].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(places[1][2], scale)
    assert places[0][2].float().abs().max() == 448


def test_scales_too_small_to_divide_by() -> None:
    """Values so small that 448th parts of them are nothing get a scale of 1, and are no NaN."""
    for grid in ("tensor", "channel", (128, 128)):
        transform, _, region, places = on((128, 128), grid)  # type: ignore[arg-type]
        content = torch.zeros(128, 128)
        content[::2] = 1e-45
        transform.derive(content, region, places, MIB)
        assert (places[0][2].float() == 0).all() and (places[1][2] == 1).all()


class Recording(DerivingPlacement):
    """Notes the most that tensors on their way take."""

    most = 0
    made = 0

    def _allocated(self, derived: DerivedTensor, dtype: torch.dtype, room: int) -> Any:
        self.most = max(self.most, sum(g.content.nbytes for g in self._gathered.values()) + 2 * volume(derived.region))
        return super()._allocated(derived, dtype, room)

    def _derive(self, derived: DerivedTensor, gathered: Any) -> None:
        super()._derive(derived, gathered)
        self.made += 1


def limits_of(found: Prepared, load: LoadConfig) -> StagingLimits:
    return staging_limits(found.plan, reader_limits(load, "cpu"))


def in_parts(found: Prepared, most_bytes: int) -> list[list[Delivery]]:
    """The parts of each delivery that something is made of."""
    return [list(d.parts(most_bytes)) for d in found.plan.deliveries if d.targets[0].param in found.plan.derived]


def bring(sink: DerivingPlacement, parts: Sequence[Delivery]) -> None:
    for part in parts:
        sink.place(part, torch.zeros([b - a for a, b in part.raw_box], dtype=torch.bfloat16))


def begin(target: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def test_threads_wait_for_room(wide: Path) -> None:
    """One thread stops in the middle of the first tensor; others that bring the rest wait, in whatever order they come, as soon as
    there is no room; when it goes on all is made, and never was more on its way than the limit."""
    load = LoadConfig(device="cpu", quantization="inline-fp8-tensor")
    found = prepared(wide, load)
    parts = in_parts(found, MIB // 16)
    room = max(2 * volume(derived.region) for derived in found.plan.derived.values())
    sink = Recording(allocate(found.model, found.plan, torch.device("cpu")), found.plan, room)
    bring(sink, parts[0][:1])
    others = [begin(bring, sink, own) for own in reversed(parts[1:])]
    for thread in others:
        thread.join(0.3)
    assert any(thread.is_alive() for thread in others), "nobody waited"
    assert sink.made < len(found.plan.derived)
    bring(sink, parts[0][1:])
    for thread in others:
        thread.join(60)
        assert not thread.is_alive()
    assert sink.made == len(found.plan.derived) and sink._held == 0 and 0 < sink.most <= room


class Waits(threading.Condition):
    """Counts who has begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.release()
        return super().wait(timeout)


def test_tensors_are_admitted_in_the_order_of_the_plan(tmp_path: Path) -> None:
    """A read may hold the end of one tensor and the beginning of the next.  If tensors came in as their parts arrive, the ends of the
    second and the fourth could take all the room, while their beginnings are held by threads that wait for room for the first and
    the third: nobody would go on.  So whoever comes before its turn waits, room or no room."""
    folder = save_tiny_llama(tmp_path / "m", dtype=torch.bfloat16, num_hidden_layers=1, num_key_value_heads=6)
    found = prepared(folder, LoadConfig(device="cpu", quantization="inline-fp8-tensor"))
    size = 48 * 48 * 2
    derived, attention = found.plan.derived, {".q.", ".k.", ".v.", ".o."}
    own = [d for d in found.plan.deliveries if d.targets[0].param in derived and any(name in d.slot for name in attention)]
    every = [list(d.parts(size // 2)) for d in found.plan.deliveries if d.targets[0].param in derived]
    at = [number for number, parts in enumerate(every) if parts[0].slot in {d.slot for d in own}]
    assert [len(every[number]) for number in at] == [2, 2, 2, 2] and at == [*range(at[0], at[0] + 4)]
    sink = Recording(allocate(found.model, found.plan, torch.device("cpu")), found.plan, 2 * size)
    sink._changed = waits = Waits()
    for parts in every[: at[0]]:
        bring(sink, parts)
    (a, b), (c, d), (e, f), (g, h) = (every[number] for number in at)
    threads = []
    for read in ([h], [d, e], [f, g], [b, c], [a]):  # the last first
        threads.append(begin(bring, sink, read))
        while threads[-1].is_alive() and not waits.begun.acquire(timeout=0.01):
            pass
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert sink.made == at[-1] + 1


def test_who_waits_leaves_when_the_load_is_given_up(wide: Path) -> None:
    """``stop`` ends every wait with an exception of its own."""
    found = prepared(wide, LoadConfig(device="cpu", quantization="inline-fp8-tensor"))
    parts = in_parts(found, MIB // 8)
    sink = DerivingPlacement(allocate(found.model, found.plan, torch.device("cpu")), found.plan, 1)
    bring(sink, parts[0][:1])
    caught: list[type[BaseException]] = []

    def run() -> None:
        try:
            bring(sink, parts[1])
        except Stopped as error:
            caught.append(type(error))

    waiting = begin(run)
    waiting.join(0.3)
    assert waiting.is_alive()
    sink.stop()
    waiting.join(60)
    assert caught == [Stopped]


class Failing(DerivingPlacement):
    """Fails at the second part of the first tensor, while others wait for its room."""

    parts = 0

    def _gather(self, derived: DerivedTensor, part: Delivery, box: Box, content: torch.Tensor) -> None:
        if self._positions[derived.name] == 0:
            self.parts += 1
            if self.parts == 2:
                threading.Event().wait(0.5)
                raise OSError("the disk has gone")
        super()._gather(derived, part, box, content)


def test_a_failing_reader_is_told_and_nobody_is_left(wide: Path) -> None:
    """The reader's error reaches the caller although other threads were waiting for room that only it could have made."""
    load = LoadConfig(device="cpu", quantization="inline-fp8-tensor")
    found = prepared(wide, load)
    sink = Failing(allocate(found.model, found.plan, torch.device("cpu")), found.plan, 1)
    transport = ScratchTransport(str(wide), torch.device("cpu"), ReaderLimits(4, MIB, 0, 1, 1 << 20))
    before = threading.active_count()
    with pytest.raises(OSError, match="the disk has gone"):
        transport.deliver(found.plan, sink, NoProgress(), lambda: None)
    assert threading.active_count() == before


class Releases(threading.Condition):
    """Asked, each time that room may have become free, what tensors on their way still have memory."""

    def __init__(self, sink: Tracked) -> None:
        super().__init__()
        self.sink, self.told = sink, 0

    def notify_all(self) -> None:
        self.told += 1
        assert sum(nbytes for memory, nbytes in self.sink.given if not memory.expired()) <= self.sink._held
        super().notify_all()


class Tracked(DerivingPlacement):
    """Knows the memory of all tensors on their way, as long as there is some."""

    def __init__(self, found: Prepared) -> None:
        super().__init__(allocate(found.model, found.plan, torch.device("cpu")), found.plan, 1)
        self.given: list[tuple[StorageWeakRef, int]] = []
        self._changed = Releases(self)

    def _allocated(self, derived: DerivedTensor, dtype: torch.dtype, room: int) -> Any:
        made = super()._allocated(derived, dtype, room)
        self.given.append((StorageWeakRef(made.content.untyped_storage()), room))
        return made


def test_room_is_free_when_the_memory_is(wide: Path) -> None:
    """Who is let in because a tensor is done finds that tensor's memory given back."""
    found = prepared(wide, LoadConfig(device="cpu", quantization="inline-fp8-tensor"))
    sink = Tracked(found)
    for parts in in_parts(found, MIB // 8):
        bring(sink, parts)
    assert isinstance(sink._changed, Releases) and sink._changed.told > len(sink.given) == len(found.plan.derived)


@pytest.mark.parametrize("grid", GRIDS)
def test_own_reader_keeps_to_the_limit(grid: str, wide: Path) -> None:
    """Four threads with small buffers: never more on its way than is predicted."""
    load = LoadConfig(device="cpu", quantization=f"inline-fp8-{grid}", reader_threads=4, buffer_mib=1)
    found = prepared(wide, load)
    room = limits_of(found, load)
    sink = Recording(allocate(found.model, found.plan, torch.device("cpu")), found.plan, room.parts)
    ScratchTransport(str(wide), torch.device("cpu"), ReaderLimits(4, MIB, 0, 1, 1 << 20)).deliver(
        found.plan, sink, NoProgress(), lambda: None
    )
    assert sink.made == len(found.plan.derived) and sink._held == 0
    assert 0 < sink.most <= room.parts + room.single
    assert room.nbytes == budget_of(wide, load).derived


def test_room_of_a_sequence(wide: Path) -> None:
    """One thread: in order just one tensor is held; side by side, as many as are begun and not ended."""
    plan = build_plan(wide, load=LoadConfig(device="cpu", quantization="inline-fp8-tensor"))
    step = step_bytes("cpu")
    parts = [list(d.parts(MIB)) for d in plan.deliveries]
    working = max(derived.transform.working_bytes(derived.region, step) for derived in plan.derived.values())
    largest = max(2 * volume(derived.region) for derived in plan.derived.values())
    assert held_bytes([part for own in parts for part in own], plan.derived, step) == largest + working
    ends = [own[-1] for own in parts]
    begun = [part for own in parts for part in own[:-1]]
    every = sum(2 * volume(derived.region) for derived, own in zip(plan.derived.values(), parts, strict=False) if len(own) > 1)
    assert largest < every <= held_bytes([*begun, *ends], plan.derived, step)
    assert staging_limits(plan, ReaderLimits(1, 1024 * MIB, 0, 1, step)).nbytes == largest + working


@pytest.mark.parametrize(("threads", "part_bytes"), [(1, 1000), (2, 1000), (20, 1000), (10**6, 1000), (20, 10**6)])
def test_room_of_threads(tmp_path: Path, threads: int, part_bytes: int) -> None:
    """Two of the largest tensors, so that one is made while another one comes; and beside one, what all threads have in hand: small
    tensors are not to stop many threads.  Never more than there is."""
    plan = build_plan(save_tiny_llama(tmp_path, dtype=torch.bfloat16), load=LoadConfig(device="cpu", quantization="inline-fp8-tensor"))
    sizes = [2 * volume(tensor.region) for tensor in plan.derived.values()]
    several = [nbytes for nbytes in sizes if nbytes > part_bytes]
    largest = max(several, default=0)
    room = staging_limits(plan, ReaderLimits(threads, part_bytes, 0, 1, MIB))
    wanted = {(1, 1000): 2 * largest, (2, 1000): 2 * largest, (20, 1000): largest + 20_000, (10**6, 1000): sum(several), (20, 10**6): 0}
    assert room.parts == wanted[threads, part_bytes]
    assert room.single == (sum(sizes) if part_bytes == 10**6 else 0)


@pytest.mark.parametrize("grid", GRIDS)
def test_tensors_that_cannot_be_divided(grid: str, wide: Path, tmp_path: Path) -> None:
    """A torch file whose matrices are stored by columns: each arrives whole, larger than a buffer, between others that come in
    parts; several threads end, with the codes of the whole, within what is predicted."""
    tensors = load_file(wide / "model.safetensors")
    state = {name: t.t().contiguous().t() if "up_proj" in name or "k_proj" in name else t for name, t in tensors.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((wide / "config.json").read_text())
    load = LoadConfig(device="cpu", quantization=f"inline-fp8-{grid}", reader_threads=4, buffer_mib=1, verify=True)
    found = prepared(tmp_path, load)
    assert any(not d.divisible and d.nbytes > MIB for d in found.plan.deliveries)
    room = limits_of(found, load)
    sink = Recording(allocate(found.model, found.plan, torch.device("cpu")), found.plan, room.parts)
    ScratchTransport(str(tmp_path), torch.device("cpu"), ReaderLimits(4, MIB, 0, 1, 1 << 20)).deliver(
        found.plan, sink, NoProgress(), lambda: None
    )
    assert sink.made == len(found.plan.derived) and sink.most <= room.parts + room.single
    for place in (ParallelConfig(), ParallelConfig(tp_size=2, tp_rank=1)):
        loaded = load_model(tmp_path, parallel=place, load=load)
        assert check_codes(loaded, tensors, grid) == 7
        assert loaded.plan.bytes_read <= sum(t.nbytes for t in loaded.plan.catalog.tensors), "a tensor was read more than once"
