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
from rtp_llm.transport.fastsafetensors.failure import FastsafetensorsFailure, Witness
from rtp_llm.transport.fastsafetensors.hand import Hand
from rtp_llm.transport.fastsafetensors.local import Ending, Means, settled
from rtp_llm.transport.fastsafetensors.probe import PACKAGE, Capabilities
from rtp_llm.transport.fastsafetensors.sequence import Chunk, Message, Piece, Split, splits
from rtp_llm.transport.interface import Moved, Progress, Sink, Transport

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

    def __init__(self, means: Means, capabilities: Capabilities, mode: StackedMode, free_bytes: int, rest: Transport) -> None:
        self._means, self._capabilities, self._mode = means, capabilities, mode
        self._free_bytes, self._rest = free_bytes, rest

    def staging_bytes(self, plan: LoadPlan) -> int:
        """Device memory beside the parameters: files as the wheel's queue holds them, and one tensor that it yields."""
        files: Counter[str] = Counter()
        for tensor in plan.catalog.tensors:
            files[tensor.file] += tensor.nbytes
        sizes = [files[name] for name in sorted(files)]
        depth = self._means.config.depth
        most = max((sum(sizes[i : i + depth]) for i in range(len(sizes))), default=0)
        return most + max((t.nbytes for t in plan.catalog.tensors), default=0)

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        hand = Hand(plan, sink, self._means.device)
        witness = Witness(self._means.directory, plan.catalog.files)
        for file in plan.catalog.files:
            witness.about(Chunk(file.name, 0, file.size, (_nothing(plan, file.name),)))
        stacked = self._stacked(plan)
        with witness.watching():
            loader = self._open(plan, stacked)
        got: set[tuple[str, int]] = set()
        with Ending(loader.close, witness):
            self._fits(loader, plan)
            weights = iter(loader.iterate_weights())
            while True:
                with witness.watching():
                    item = next(weights, None)
                if item is None:
                    break
                check()
                progress.advance(self._take(hand, stacked, got, *item))
                settled(self._means.device)
                del item
            del weights
        read = sum(t.nbytes for t in plan.catalog.tensors)
        left = tuple(d for d in plan.deliveries if d.nbytes and not _came(d.tensor.name, d.raw_box, got))
        if not left:
            return Moved(read, hand.kept_bytes, 0, hand.kept_bytes)
        rest = self._rest.deliver(replace(plan, deliveries=left), sink, progress, check)
        placed = hand.kept_bytes + rest.bytes_placed
        return Moved(read + rest.bytes_read, hand.kept_bytes + rest.bytes_copied, len(left), placed)

    def _stacked(self, plan: LoadPlan) -> Mapping[str, str]:
        """Stacked tensors that the wheel is to split, with the template of the keys it is to make."""
        if self._capabilities.stacked_split is None:
            return {}
        kinds = splits(plan.slots, self._mode)
        return {raw: _escaped(raw) + _MARK + "{expert_id}" for raw, kind in kinds.items() if kind is Split.EXPERTS}

    def _open(self, plan: LoadPlan, stacked: Mapping[str, str]) -> Any:
        options: dict[str, object] = {"device": str(self._means.device)}
        if self._capabilities.copyout_filter is not None:
            options[self._capabilities.copyout_filter] = frozenset(_keys(plan, stacked)).__contains__
        if self._capabilities.stacked_split is not None and stacked:
            options[self._capabilities.stacked_split] = dict(stacked)
        paths = [os.path.join(self._means.directory, f.name) for f in plan.catalog.files]
        return importlib.import_module(PACKAGE).AutoLoader(None, paths, **options)

    def _fits(self, loader: Any, plan: LoadPlan) -> None:
        if self._capabilities.estimate is None:
            return
        stated = getattr(loader, self._capabilities.estimate, None)
        needed = larger_estimate(self.staging_bytes(plan), stated() if callable(stated) else stated)
        if needed > self._free_bytes:
            raise FastsafetensorsFailure(f"its own estimate is {needed} bytes, and {self._free_bytes} are free")

    @staticmethod
    def _take(hand: Hand, stacked: Mapping[str, str], got: set[tuple[str, int]], key: str, tensor: torch.Tensor) -> int:
        name, mark, number = key.partition(_MARK)
        if not mark:
            got.add((name, -1))
            return hand.take_whole(name, tensor)
        expert = int(number)
        got.add((name, expert))
        return hand.take_expert(name, expert, tensor)


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
    return Message((Piece(first, whole(first.shape), first.start, first.stop, Split.NEVER),))
