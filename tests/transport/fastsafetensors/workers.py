"""What processes of these tests run: a load that is looked at from within."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Records(logging.Handler):
    """The log as (level, text)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append((record.levelname, record.getMessage()))


def hide() -> Callable[[], None]:
    """Makes the import system blind to the package, as where it is not installed; returns how to undo it."""
    from importlib.machinery import PathFinder

    find = PathFinder.find_spec
    PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == "fastsafetensors" else find(name, *rest))  # type: ignore[method-assign,assignment]
    return lambda: setattr(PathFinder, "find_spec", find)


def look_at_scratch() -> dict[str, Any]:
    """Notes, when the scratch transport begins, what is left of an attempt by fastsafetensors."""
    from rtp_llm.transport.scratch.reader import ScratchTransport

    deliver = ScratchTransport.deliver
    noted: dict[str, Any] = {}

    def noting(self: ScratchTransport, *args: Any) -> Any:
        package = sys.modules.get("fastsafetensors")
        parallel = sys.modules.get("fastsafetensors.parallel_loader")
        refs = getattr(package, "alive", None) or []
        noted["seen"] = len(refs)
        noted["alive"] = sum(ref() is not None for ref in refs)
        noted["buffers"] = package.live_allocation_count() if package is not None and parallel is not None else 0
        noted["threads"] = sum("_producer_worker" in t.name for t in threading.enumerate())
        return deliver(self, *args)

    ScratchTransport.deliver = noting  # type: ignore[method-assign]
    return noted


def load(directory: str, **settings: Any) -> dict[str, Any]:
    """Loads in this process on the CPU, verified."""
    from rtp_llm import LoadConfig, ParallelConfig, load_model

    undo = hide() if settings.pop("hide", False) else None
    sizes = {name: settings.pop(name) for name in ("tp_size", "tp_rank", "ep_size", "ep_rank") if name in settings}
    records = Records()
    logging.getLogger("rtp_llm").addHandler(records)
    logging.getLogger("rtp_llm").setLevel(logging.INFO)
    noted = look_at_scratch()
    chosen = {"load_method": "fastsafetensors", "device": "cpu", "verify": True} | settings
    model = load_model(directory, parallel=ParallelConfig(**sizes) if sizes else None, load=LoadConfig(**chosen))
    if undo is not None:
        undo()
    logging.getLogger("rtp_llm").removeHandler(records)
    return {"report": model.report.to_json(), "log": records.found, "at_scratch": noted}


def rank_load(directory: str, faults: dict[str, Any], settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same on one of several ranks, of which some may be unlike the others."""
    rank = int(os.environ["RANK"])
    settings = dict(settings or {})
    if faults.get("broken_on") == rank:
        sys.path.insert(0, faults["wheel"])
    if faults.get("hidden_on") == rank:
        hide()
    if faults.get("budget_on") == rank:
        settings["fastsafetensors_config_json"] = json.dumps({"device_memory_budget": 130_000})
    return load(directory, **settings)


def save_moe(directory: Path, variant: str = "qwen3_moe", *, published: bool = True, dtype: str = "float32") -> Path:
    """A small model with experts, a tensor for each or all in one."""
    import torch

    from tests.moe.variants import make

    with contextlib.redirect_stderr(io.StringIO()):
        make(variant, directory, published=published, dtype=getattr(torch, dtype))
    return directory


def forget() -> None:
    """Forgets the package, and what was bound to it."""
    for name in [n for n in sys.modules if n.split(".")[0] == "fastsafetensors" or n.endswith("fastsafetensors.pipeline")]:
        del sys.modules[name]
    importlib.invalidate_caches()


def load_all(cases: dict[str, list[Any]]) -> dict[str, dict[str, Any]]:
    """For each case a directory, a folder with a package or None, and settings; loaded one after another."""
    found = {}
    for name, (directory, wheel, settings) in cases.items():
        forget()
        sys.path[:0] = [wheel] if wheel else []
        found[name] = load(directory, **settings)
        if wheel:
            sys.path.remove(wheel)
    return found


def count(settings: dict[str, Any], directory: str) -> dict[str, Any]:
    """A load whose allocations are counted: their peak beside the report."""
    from rtp_llm.loader import load as load_module
    from tests.transport.fastsafetensors.counting import Counting

    move = load_module.fill_parameters
    counting = Counting()

    def counted(*args: Any) -> Any:
        with counting:
            return move(*args)

    load_module.fill_parameters = counted
    try:
        return load(directory, **settings) | {"peak": counting.peak}
    finally:
        load_module.fill_parameters = move


def rank_loads(cases: list[tuple[str, dict[str, Any]]], counted: bool = False) -> list[dict[str, Any]]:
    """Several loads one after another on each rank; ``ep_size`` in settings divides the ranks."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = []
    for directory, settings in cases:
        ep_size = settings.get("ep_size", 1)
        tp_size = world // ep_size
        place = {"tp_size": tp_size, "tp_rank": rank % tp_size, "ep_size": ep_size, "ep_rank": rank // tp_size}
        found.append(count(settings | place, directory) if counted else load(directory, **settings | place))
    return found


def rank_same(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[str, str, bool]]:
    """For each checkpoint and its settings what fastsafetensors' load is called, and whether it holds the bits of scratch's."""
    import torch

    from rtp_llm import LoadConfig, ParallelConfig, load_model

    rank, world, found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), []
    for directory, settings in cases:
        ep_size = settings.pop("ep_size", 1)
        tp_size = world // ep_size
        place = ParallelConfig(tp_size, rank % tp_size, ep_size, rank // tp_size)
        models = [
            load_model(directory, parallel=place, load=LoadConfig(device="cpu", load_method=method, **settings))
            for method in ("scratch", "fastsafetensors")
        ]
        bits = [{name: p.data.contiguous().reshape(-1).view(torch.uint8) for name, p in model.model.named_parameters()} for model in models]
        same = bits[0].keys() == bits[1].keys() and all(torch.equal(bits[0][name], bits[1][name]) for name in bits[0])
        found.append((directory, models[1].report.load_method, same))
    return found


def rank_dtypes(directory: str, chunk_bytes: int) -> dict[str, Any]:
    """Rank-local boxes of every dtype through the group's transport; returns what this rank holds, as bytes."""
    import torch

    from rtp_llm.config.load import StackedMode
    from rtp_llm.parallel.world import join_world
    from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, ReaderContext
    from rtp_llm.transport.fastsafetensors.group import GroupTransport
    from rtp_llm.transport.fastsafetensors.sequence import group_order
    from rtp_llm.transport.interface import NoProgress
    from tests.transport.fastsafetensors.plans import Collect, plan_for, rows_of

    world = join_world(os.environ, "cpu", 60.0)
    plan = plan_for(Path(directory), rows_of(world.rank, world.size))
    context = ReaderContext(directory, torch.device("cpu"), EffectiveConfig(copier="nogds"), 2, {})
    sink = Collect(plan)
    with world.watch() as watch:
        order = group_order(plan, StackedMode.PER_EXPERT, chunk_bytes, world.size)
        moved = GroupTransport(context, order, "terms", world, watch).deliver(plan, sink, NoProgress(), watch.check)
        watch.exchange(b"done")
    assert moved.bytes_placed == plan.bytes_read
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in sink.memory.items()}


def rank_fault(directories: list[str], fault: str, marks: str, timeout_s: float) -> None:
    """A load in which one rank is unlike the others or comes to harm; each says why it has ended."""
    from rtp_llm import LoadConfig, load_model
    from rtp_llm.errors import RtpLlmError
    from rtp_llm.loader.budget import transport
    from rtp_llm.transport.fastsafetensors import pipeline

    rank = int(os.environ["RANK"])
    harmed = rank == 1
    if harmed and fault == "order":
        in_order = transport.order_of
        transport.order_of = lambda *args: tuple(reversed(in_order(*args)))
    if harmed and fault in ("killed", "cut", "frozen"):
        harm_reads(pipeline.ChunkReader, fault, Path(directories[rank]), Path(marks))
    try:
        load_model(directories[rank], load=LoadConfig(device="cpu", load_method="fastsafetensors", timeout_s=timeout_s))
    except RtpLlmError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error


def harm_reads(reader: Any, fault: str, directory: Path, marks: Path) -> None:
    """At the second message that this rank reads, it dies, freezes, or loses the end of its files."""
    ask = reader.next
    asked = []

    def next(self: Any) -> Any:
        asked.append(1)
        if len(asked) == 2:
            (marks / "harm").touch()
            if fault == "cut":
                for file in directory.glob("*.safetensors"):
                    os.truncate(file, file.stat().st_size - 64)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        return ask(self)

    reader.next = next


if __name__ == "__main__":
    print(json.dumps(load_all(json.loads(sys.argv[1]))))
