"""Parameters that are made while they are loaded: a tensor is gathered, made into parameters, and let go."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from rtp_llm.loader.placement import Placement
from rtp_llm.plan.boxes import extent, view, volume
from rtp_llm.plan.making import Stage
from rtp_llm.plan.plan import Delivery


@dataclass(slots=True)
class _Gathered:
    """A stage's tensor on its way: its memory, the elements still to come, and what was queued to fill it."""

    content: torch.Tensor
    left: int
    written: list[torch.cuda.Event] = field(default_factory=list)


class MakingPlacement(Placement):
    """A sink that makes parameters of some deliveries, and places the others.

    A stage's tensor has its memory from its first part to its last; the thread that brings the last part makes the parameters.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], stages: Mapping[str, Stage]) -> None:
        super().__init__(dict(params))
        self._stages = stages
        self._device = next(iter(params.values())).device if params else torch.device("cpu")
        self._lock = threading.Lock()
        self._gathered: dict[str, _Gathered] = {}

    def direct(self, part: Delivery) -> Any:
        if any(target.param in self._stages for target in part.targets):
            return None
        return super().direct(part)

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        plain: list[tuple[Delivery, torch.Tensor]] = []
        for part, content in items:
            staged = [target for target in part.targets if target.param in self._stages]
            if not staged:
                plain.append((part, content))
                continue
            (target,) = staged
            self._gather(self._stages[target.param], part, target.box, content)
            others = tuple(other for other in part.targets if other is not target)
            if others:
                plain.append((replace(part, targets=others), content))
        if plain:
            super().place_all(plain)

    def _gather(self, stage: Stage, part: Delivery, box: tuple[tuple[int, int], ...], content: torch.Tensor) -> None:
        with self._lock:
            gathered = self._gathered.get(stage.name)
            if gathered is None:
                memory = torch.empty(extent(stage.region), dtype=content.dtype, device=self._device)
                gathered = self._gathered[stage.name] = _Gathered(memory, volume(stage.region))
        place = view(gathered.content, box)
        moved = content.to(self._device, non_blocking=True)
        place.copy_(part.source.apply(moved, part.slot_box).reshape(place.shape), non_blocking=True)
        event = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            gathered.content.record_stream(stream)
            event = stream.record_event()
        with self._lock:
            if event is not None:
                gathered.written.append(event)
            gathered.left -= volume(box)
            if gathered.left:
                return
            del self._gathered[stage.name]
        for done in gathered.written:
            torch.cuda.current_stream(self._device).wait_event(done)
        self._make(stage, gathered.content)

    def _make(self, stage: Stage, content: torch.Tensor) -> None:
        outputs = stage.maker.make(content, stage.region)
        for product in stage.products:
            tensor, box = outputs[product.output]
            wanted = view(tensor, tuple((a - o, b - o) for (a, b), (o, _) in zip(product.box, box, strict=True)))
            place = self._place(product.param, product.local_box)
            place.copy_(wanted.reshape(place.shape), non_blocking=True)
