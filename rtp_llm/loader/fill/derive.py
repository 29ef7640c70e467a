"""Parameters that are made while they are loaded: a tensor is gathered, made into parameters, and let go.

On a CUDA device all of it has its memory from, and is made on, one stream: so memory is handed on from tensor to tensor in the
order of that stream, with no wait of the host and no pool of memory for each reader thread.
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

#: From this size on, memory on the CPU is mapped and not from the heap, which keeps up to 64 MiB of it for each thread once it has been
#: given back (mallopt(3), M_MMAP_THRESHOLD: it grows with what is freed): so much more than is held at a time.
_MAPPED_BYTES = 1 << 20


def _memory(shape: Shape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on its way, which goes back to the system when it is let go."""
    nbytes = prod(shape) * dtype.itemsize
    if device.type == "cpu" and nbytes >= _MAPPED_BYTES:
        return in_huge_pages(nbytes).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


class Stopped(Exception):
    """What a thread gets that waited for room when the load was given up; the error that is told is another one's."""


@dataclass(slots=True)
class _Gathered:
    """A derived's tensor on its way: its memory, how much of the room that takes, when it may be written, the elements still to come,
    and what was queued to fill it."""

    content: torch.Tensor
    room: int
    ready: torch.cuda.Event | None
    left: int
    written: list[torch.cuda.Event] = field(default_factory=list)


class DerivingPlacement(Placement):
    """A sink that makes parameters of some deliveries, and places the others.

    A derived's tensor has its memory from its first part to its last; the thread that brings the last part makes the parameters.

    Args:
        params: all parameters, by name.
        plan: what is delivered.
        room: bytes of tensors, of those that come in parts, that may be on their way.  Whoever brings the first part of another
            one waits for its turn, in the order of the plan's deliveries, and until there is room.  That ends: who waits has
            placed all that comes before, so what has room has all its parts on their way.  None: there is one thread, which
            could only wait for itself.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], plan: LoadPlan, room: int | None = None) -> None:
        super().__init__(dict(params))
        self._derived = plan.derived
        self._device = next(iter(params.values())).device if params else torch.device("cpu")
        self._step_bytes = step_bytes(self._device.type)
        on_device = bool(plan.derived) and self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if on_device else None  # type: ignore[no-untyped-call]
        self._making: AbstractContextManager[Any] = threading.Lock() if on_device else nullcontext()
        self._room, self._held, self._stopped = room, 0, False
        self._changed = threading.Condition()
        self._gathered: dict[str, _Gathered] = {}
        self._positions = {name: place for place, name in enumerate(dict.fromkeys(derived.name for derived, _ in derived_deliveries(plan)))}
        self._come: set[int] = set()
        self._turn = 0

    def stop(self) -> None:
        """Ends the wait of all who wait for room."""
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
        gathered = self._entered(derived, content.dtype, alone=volume(box) == volume(derived.region))
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
        self._make(derived, gathered)
        room = gathered.room
        del gathered, place  # its memory is gone before another one may take the room
        with self._changed:
            self._held -= room
            self._changed.notify_all()

    def _entered(self, derived: DerivedTensor, dtype: torch.dtype, *, alone: bool) -> _Gathered:
        """The derived's tensor, with memory.  ``alone``: it comes in one part, and so needs no other to be let go of."""
        place, nbytes = self._positions[derived.name], volume(derived.region) * dtype.itemsize

        def may_enter() -> bool:
            if self._stopped or derived.name in self._gathered or alone or self._room is None:
                return True
            return place == self._turn and (not self._held or self._held + nbytes <= self._room)

        with self._changed:
            self._changed.wait_for(may_enter)
            if self._stopped:
                raise Stopped
            found = self._gathered.get(derived.name)
            if found is not None:
                return found
            self._come.add(place)
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
        # Not torch's context of None: finding out that it does nothing takes it as long as two operations.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _make(self, derived: DerivedTensor, gathered: _Gathered) -> None:
        places = [(p.output, p.box, self._place(p.param, p.local_box).view(extent(p.box))) for p in derived.places]
        with self._making, self._on_stream():
            if self._stream is not None:
                for event in gathered.written:
                    self._stream.wait_event(event)
            derived.transform.derive(gathered.content, derived.region, places, self._step_bytes)
