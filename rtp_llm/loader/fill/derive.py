"""Derives parameters while loading: a tensor is gathered, parameters are derived from it, and its memory is freed.

On a CUDA device one stream allocates the tensors and derives from them.  So memory passes from tensor to tensor in stream order: the
host never waits, and reader threads need no memory pools of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from rtp_llm.loader.context import step_bytes
from rtp_llm.loader.fill.placement import Placement
from rtp_llm.plan.boxes import Box, Shape, extent, view, volume
from rtp_llm.plan.budget import derived_deliveries
from rtp_llm.plan.derived import DerivedTensor
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.interface import Place
from rtp_llm.transport.scratch.staging import in_huge_pages

#: From this size on, CPU memory is mapped.  The heap would keep up to 64 MiB of freed memory for each thread (mallopt(3),
#: M_MMAP_THRESHOLD, which grows with freed sizes).
_MAPPED_BYTES = 1 << 20


def _memory(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a gathered tensor, which returns to the system when freed."""
    nbytes = prod(shape) * dtype.itemsize
    if device.type == "cpu" and nbytes >= _MAPPED_BYTES:
        return in_huge_pages(nbytes).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


class Stopped(Exception):
    """Raised in a thread that waits for room when the load fails; the error that caused it is reported."""


@dataclass(slots=True)
class _Gathered:
    """A derived tensor while it is gathered.  ``room``: bytes that count against the limit.  ``ready``: its memory may be written.
    ``left``: missing elements.  ``written``: the queued copies."""

    content: torch.Tensor
    room: int
    ready: torch.cuda.Event | None
    left: int
    written: list[torch.cuda.Event] = field(default_factory=list)


class DerivingPlacement(Placement):
    """A sink that derives parameters from some deliveries, and places the others.

    A derived tensor has memory from its first part to its last; the thread with the last part derives the parameters.

    Args:
        params: all parameters, by name.
        plan: the plan that is delivered.
        room: most bytes of tensors in several parts at a time.  A thread with the first part of another one waits for its turn, in
            plan order, and for room.  Cannot deadlock: tensors are admitted in plan order, so the parts of an admitted tensor are
            already with running threads.  None: no limit, for a transport with one thread.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], plan: LoadPlan, room: int | None = None) -> None:
        super().__init__(dict(params))
        self._derived = plan.derived
        self._device = next(iter(params.values())).device if params else torch.device("cpu")
        self._step_bytes = step_bytes(self._device.type)
        on_device = bool(plan.derived) and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_device else None  # type: ignore[no-untyped-call]
        self._deriving: AbstractContextManager[Any] = threading.Lock() if on_device else nullcontext()
        self._room, self._held, self._stopped = room, 0, False
        self._changed = threading.Condition()
        self._gathered: dict[str, _Gathered] = {}
        names = dict.fromkeys(derived.name for derived, _ in derived_deliveries(plan))
        self._positions = {name: position for position, name in enumerate(names)}
        self._come: set[int] = set()
        self._turn = 0

    def stop(self) -> None:
        """Ends every wait for room."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def direct(self, part: Delivery) -> Place | None:
        if any(target.param in self._derived for target in part.targets):
            return None
        return super().direct(part)

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        plain: list[tuple[Delivery, torch.Tensor]] = []
        for part, content in items:
            staged = [target for target in part.targets if target.param in self._derived]
            for target in staged:
                self._gather(self._derived[target.param], part, target.box, content)
            others = tuple(other for other in part.targets if other.param not in self._derived)
            if others:
                plain.append((replace(part, targets=others) if staged else part, content))
        if plain:
            super().place_all(plain)

    def _gather(self, derived: DerivedTensor, part: Delivery, box: Box, content: torch.Tensor) -> None:
        gathered = self._admitted(derived, content.dtype, alone=volume(box) == volume(derived.region))
        place, event = view(gathered.content, box), None
        if gathered.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(gathered.ready)
        if not (part.verbatim and place.is_contiguous()):
            content = part.source.apply(content.to(self._device, non_blocking=True), part.slot_box)
        place.copy_(content.reshape(place.shape), non_blocking=True)
        if gathered.ready is not None:
            event = torch.cuda.current_stream(self._device).record_event()
        with self._changed:
            if event is not None:
                gathered.written.append(event)
            gathered.left -= volume(box)
            if gathered.left:
                return
            del self._gathered[derived.name]
        self._derive(derived, gathered)
        room = gathered.room
        del gathered, place  # frees its memory before another tensor takes the room
        with self._changed:
            self._held -= room
            self._changed.notify_all()

    def _admitted(self, derived: DerivedTensor, dtype: torch.dtype, *, alone: bool) -> _Gathered:
        """The derived tensor, with memory.  ``alone``: it comes in one part, and needs no room."""
        position, nbytes = self._positions[derived.name], volume(derived.region) * dtype.itemsize

        def may_admit() -> bool:
            if self._stopped or derived.name in self._gathered or alone or self._room is None:
                return True
            return position == self._turn and (not self._held or self._held + nbytes <= self._room)

        with self._changed:
            self._changed.wait_for(may_admit)
            if self._stopped:
                raise Stopped
            found = self._gathered.get(derived.name)
            if found is not None:
                return found
            self._come.add(position)
            while self._turn in self._come:
                self._come.remove(self._turn)
                self._turn += 1
            self._changed.notify_all()
            found = self._gathered[derived.name] = self._allocated(derived, dtype, 0 if alone else nbytes)
            self._held += found.room
            return found

    def _allocated(self, derived: DerivedTensor, dtype: torch.dtype, room: int) -> _Gathered:
        with self._on_stream():
            content = _memory(extent(derived.region), dtype, self._device)
        return _Gathered(content, room, None if self._stream is None else self._stream.record_event(), volume(derived.region))

    def _on_stream(self) -> AbstractContextManager[Any]:
        # Not torch's context of None, which takes as long as two operations.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _derive(self, derived: DerivedTensor, gathered: _Gathered) -> None:
        places = [(p.output, p.box, self._place(p.param, p.local_box).view(extent(p.box))) for p in derived.places]
        with self._deriving, self._on_stream():
            if self._stream is not None:
                for event in gathered.written:
                    self._stream.wait_event(event)
            derived.transform.derive(gathered.content, derived.region, places, self._step_bytes)
