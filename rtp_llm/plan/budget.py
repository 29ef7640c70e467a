"""What carrying out a plan takes on a device, in bytes: pure arithmetic over its deliveries.

Parameters that are derived of a tensor need it whole, or a region of it, on the device.  How much of that is held at a time depends on
the transport: threads that work side by side are held to a limit; a transport with one thread has its sequence.
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
class Budget:
    """What one rank's plan takes on its device by one transport, in bytes.

    ``resident``: the parameters.  ``staging``: the transport's buffers.  ``derived``: tensors that parameters are derived of, while they
    are on their way.  ``transient``: the largest temporary beside all of these.
    """

    transport: str
    resident: int
    staging: int
    derived: int
    transient: int

    @property
    def peak(self) -> int:
        """The predicted peak."""
        return self.resident + self.staging + self.derived + self.transient

    def to_json(self) -> dict[str, int]:
        """The fields of a plan's and a report's JSON that depend on the transport."""
        return {"bytes_staging": self.staging, "bytes_making": self.derived, "predicted_peak_bytes": self.peak}


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """The own reader's limits, resolved from the settings once for a load.

    ``threads`` read, each into a buffer of ``buffer_bytes``; gaps between rows of up to ``gap_bytes`` are read over.  ``derivers`` of the
    threads may derive parameters at a time, with ``step_bytes`` of working memory each (more where a single row takes more).
    """

    threads: int
    buffer_bytes: int
    gap_bytes: int
    derivers: int
    step_bytes: int


@dataclass(frozen=True, slots=True)
class StagingLimits:
    """Memory for tensors on their way.  ``parts``: those that come in several reads (enforced).  ``single``: those that come in one read
    (bounded by the number of threads).  ``working``: scratch memory for deriving parameters."""

    parts: int
    single: int
    working: int

    @property
    def nbytes(self) -> int:
        return self.parts + self.single + self.working


def transient_bytes(deliveries: Iterable[Delivery]) -> int:
    """The largest temporary outside of staging: twice the largest tensor that must be read whole, once for an op's result."""
    return max((2 * d.nbytes for d in deliveries if not d.divisible), default=0)


def content_bytes(stage: Stage, delivery: Delivery) -> int:
    """What a stage's tensor takes in its stored dtype."""
    return volume(stage.region) * DTYPES[delivery.tensor.dtype].bits // 8


def staging_limits(plan: LoadPlan, reader: ReaderLimits) -> StagingLimits:
    """The limits for threads that go through a plan's deliveries in order.

    Two of the largest tensors: one is gathered while another one is processed.  And never less than one tensor and a buffer for each
    thread, so that a limit of small tensors does not stop the threads.
    """
    if not plan.stages:
        return StagingLimits(0, 0, 0)
    staged = [(content_bytes(stage, d), stage, d) for stage, d in staged_deliveries(plan)]
    several = [nbytes for nbytes, _, d in staged if d.nbytes > reader.buffer_bytes and d.divisible]
    # One that cannot be divided comes whole, one at a time if it is larger than a buffer, and is held again while an op works on it.
    undivided = max((2 * nbytes for nbytes, _, d in staged if d.nbytes > reader.buffer_bytes and not d.divisible), default=0)
    small = [nbytes for nbytes, _, d in staged if d.nbytes <= reader.buffer_bytes]
    largest = max(several, default=0)
    parts = min(sum(several), largest + max(largest, reader.threads * reader.buffer_bytes))
    single = undivided + min(sum(small), reader.threads * max(small, default=0))
    working = max((stage.maker.working_bytes(stage.region, reader.step_bytes) for _, stage, _ in staged), default=0)
    return StagingLimits(parts, single, min(reader.derivers, len(staged)) * working)


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
