"""How much of what parameters are made of may be on its way at a time.

A part of a tensor that waits for the others takes memory on the device.  How much of it there is depends on who brings the
parts: threads that work side by side are held to a limit; one that works alone has its sequence, which is gone through here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.boxes import extent, volume
from rtp_llm.plan.making import Stage
from rtp_llm.plan.plan import Delivery, LoadPlan


@dataclass(frozen=True, slots=True)
class Hands:
    """Who brings parts: ``threads``, each with at most ``part_bytes`` of a tensor at a time; ``makers`` of them may make
    parameters at a time, of at most ``step_bytes`` of working memory each (more where a row alone takes more)."""

    threads: int
    part_bytes: int
    makers: int
    step_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of tensors that come in ``parts``, which threads are held to; of those that come in one, which wait for nobody and so
    never for room; and of working memory."""

    parts: int
    single: int
    working: int

    @property
    def nbytes(self) -> int:
        return self.parts + self.single + self.working


def content_bytes(stage: Stage, delivery: Delivery) -> int:
    """What a stage's tensor takes in its stored dtype."""
    return volume(stage.region) * DTYPES[delivery.tensor.dtype].bits // 8


def room_for(plan: LoadPlan, hands: Hands) -> Room:
    """The limit for threads that go through a plan's deliveries in order.

    Two of the largest, so that one is gathered while another one is made; and no less than one and what all threads have in
    hand, so that a limit of small tensors does not stop them.
    """
    if not plan.stages:
        return Room(0, 0, 0)
    staged = [(content_bytes(stage, d), stage, d) for stage, d in staged_deliveries(plan)]
    several = [nbytes for nbytes, _, d in staged if d.nbytes > hands.part_bytes and d.divisible]
    # One that cannot be divided comes whole, one at a time if it is larger than a buffer, and is held again while an op works on it.
    undivided = max((2 * nbytes for nbytes, _, d in staged if d.nbytes > hands.part_bytes and not d.divisible), default=0)
    small = [nbytes for nbytes, _, d in staged if d.nbytes <= hands.part_bytes]
    largest = max(several, default=0)
    parts = min(sum(several), largest + max(largest, hands.threads * hands.part_bytes))
    single = undivided + min(sum(small), hands.threads * max(small, default=0))
    working = max((stage.maker.working_bytes(stage.region, hands.step_bytes) for _, stage, _ in staged), default=0)
    return Room(parts, single, min(hands.makers, len(staged)) * working)


def held_bytes(parts: Iterable[Delivery], stages: Mapping[str, Stage], step_bytes: int) -> int:
    """The most that one thread holds which brings ``parts`` in this order: tensors that lack some, and what making one takes."""
    left: dict[str, int] = {}
    held = most = 0
    for part in parts:
        for target in part.targets:
            stage = stages.get(target.param)
            if stage is None:
                continue
            if stage.name not in left:
                left[stage.name] = volume(stage.region)
                held += content_bytes(stage, part)
            most = max(most, held)
            left[stage.name] -= prod(extent(target.box))
            if not left[stage.name]:
                most = max(most, held + stage.maker.working_bytes(stage.region, step_bytes))
                held -= content_bytes(stage, part)
    return most


def staged_deliveries(plan: LoadPlan) -> Iterator[tuple[Stage, Delivery]]:
    """What parameters are made of, in order, but for what has no byte."""
    if plan.stages:  # most plans have none, and many deliveries
        for delivery in plan.deliveries:
            for target in delivery.targets:
                if target.param in plan.stages and delivery.nbytes:
                    yield plan.stages[target.param], delivery
