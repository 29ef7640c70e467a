"""One process, by AutoLoader itself: for wheels that have no other way in, or extensions of AutoLoader.

Tensors arrive whole, or, where the wheel splits stacked ones, expert by expert; a file's data stands on the device at a time.
"""

from __future__ import annotations

import importlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rtp_llm.config.load import StackedMode
from rtp_llm.plan.boxes import whole
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.fastsafetensors.config import ReaderContext
from rtp_llm.transport.fastsafetensors.dispatch import Dispatcher
from rtp_llm.transport.fastsafetensors.failure import FailureDiagnoser, FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.local import Closing, settled
from rtp_llm.transport.fastsafetensors.probe import PACKAGE, Capabilities
from rtp_llm.transport.fastsafetensors.sequence import Chunk, FilePiece, Message, Split, splits
from rtp_llm.transport.interface import Progress, Sink, TransferStats, Transport

#: Between a stacked tensor's name and an expert's number in the keys that a wheel is told to make; in no tensor's name.
_MARK = "\x1f"


def larger_estimate(own: int, upstream: object) -> int:
    """The larger of our estimate of bytes and the wheel's, which counts only if it is a finite number above zero."""
    if isinstance(upstream, bool) or not isinstance(upstream, (int, float)) or not math.isfinite(upstream) or upstream <= 0:
        return own
    return max(own, int(upstream))


class WholeTransport:
    """Places what AutoLoader yields.  ``rest`` fetches, one by one, what it did not yield: the slow path."""

    name = "fastsafetensors"

    def __init__(self, context: ReaderContext, capabilities: Capabilities, mode: StackedMode, free_bytes: int, rest: Transport) -> None:
        self._context, self._capabilities, self._mode = context, capabilities, mode
        self._free_bytes, self._rest = free_bytes, rest

    def staging_bytes(self, plan: LoadPlan) -> int:
        """Device memory beside the parameters: files as the wheel's queue holds them, and one tensor that it yields."""
        files: Counter[str] = Counter()
        for tensor in plan.catalog.tensors:
            files[tensor.file] += tensor.nbytes
        sizes = [files[name] for name in sorted(files)]
        depth = self._context.config.depth
        most = max((sum(sizes[i : i + depth]) for i in range(len(sizes))), default=0)
        return most + max((t.nbytes for t in plan.catalog.tensors), default=0)

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> TransferStats:
        dispatcher = Dispatcher(plan, sink, self._context.device)
        diagnoser = FailureDiagnoser(self._context.directory, plan.catalog.files)
        for file in plan.catalog.files:
            diagnoser.about(Chunk(file.name, 0, file.size, (_nothing(plan, file.name),)))
        stacked = self._stacked(plan)
        with diagnoser.watching():
            loader = self._open(plan, stacked)
        got: set[tuple[str, int]] = set()
        with Closing(loader.close, diagnoser):
            self._fits(loader, plan)
            weights = iter(loader.iterate_weights())
            while True:
                with diagnoser.watching():
                    item = next(weights, None)
                if item is None:
                    break
                check()
                progress.advance(self._take(dispatcher, stacked, got, *item))
                settled(self._context.device)
                del item
            del weights
        read = sum(t.nbytes for t in plan.catalog.tensors)
        left = tuple(d for d in plan.deliveries if d.nbytes and not _came(d.tensor.name, d.raw_box, got))
        if not left:
            return TransferStats(read, dispatcher.kept_bytes, 0, dispatcher.kept_bytes)
        rest = self._rest.deliver(replace(plan, deliveries=left), sink, progress, check)
        placed = dispatcher.kept_bytes + rest.bytes_placed
        return TransferStats(read + rest.bytes_read, dispatcher.kept_bytes + rest.bytes_copied, len(left), placed)

    def _stacked(self, plan: LoadPlan) -> Mapping[str, str]:
        """Stacked tensors that the wheel is to split, with the template of the keys it is to make."""
        if self._capabilities.stacked_split is None:
            return {}
        kinds = splits(plan.slots, self._mode)
        return {raw: _escaped(raw) + _MARK + "{expert_id}" for raw, kind in kinds.items() if kind is Split.EXPERTS}

    def _open(self, plan: LoadPlan, stacked: Mapping[str, str]) -> Any:
        options: dict[str, object] = {"device": str(self._context.device)}
        if self._capabilities.copyout_filter is not None:
            options[self._capabilities.copyout_filter] = frozenset(_keys(plan, stacked)).__contains__
        if self._capabilities.stacked_split is not None and stacked:
            options[self._capabilities.stacked_split] = dict(stacked)
        paths = [os.path.join(self._context.directory, f.name) for f in plan.catalog.files]
        return importlib.import_module(PACKAGE).AutoLoader(None, paths, **options)

    def _fits(self, loader: Any, plan: LoadPlan) -> None:
        if self._capabilities.estimate is None:
            return
        stated = getattr(loader, self._capabilities.estimate, None)
        needed = larger_estimate(self.staging_bytes(plan), stated() if callable(stated) else stated)
        if needed > self._free_bytes:
            raise FastsafetensorsFailure(f"its own estimate is {needed} bytes, and {self._free_bytes} are free")

    @staticmethod
    def _take(dispatcher: Dispatcher, stacked: Mapping[str, str], got: set[tuple[str, int]], key: str, tensor: torch.Tensor) -> int:
        name, mark, number = key.partition(_MARK)
        if not mark:
            got.add((name, -1))
            return dispatcher.take_whole(name, tensor)
        expert = int(number)
        got.add((name, expert))
        return dispatcher.take_expert(name, expert, tensor)


def _came(name: str, raw_box: tuple[tuple[int, int], ...], got: set[tuple[str, int]]) -> bool:
    return (name, -1) in got or bool(raw_box and (name, raw_box[0][0]) in got)


def _keys(plan: LoadPlan, stacked: Mapping[str, str]) -> list[str]:
    """The keys that this rank wants, as the wheel makes them."""
    return [
        stacked[d.tensor.name].format(expert_id=d.raw_box[0][0]) if d.tensor.name in stacked else d.tensor.name for d in plan.deliveries
    ]


def _escaped(name: str) -> str:
    return name.replace("{", "{{").replace("}", "}}")


def _nothing(plan: LoadPlan, file: str) -> Message:
    """Stands for all of a file, to say which tensor comes first where it cannot be read."""
    first = min((t for t in plan.catalog.tensors if t.file == file), key=lambda t: t.start)
    return Message((FilePiece(first, whole(first.shape), first.start, first.stop, Split.NEVER),))
