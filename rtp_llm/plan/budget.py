"""What carrying out a plan takes on a device, in bytes: pure arithmetic over its deliveries.

Derived parameters need their tensor, or a region of it, whole on the device.  The transport decides how many such tensors are held at a
time: the own reader's threads obey a limit; a transport with one thread follows its sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.boxes import extent, volume
from rtp_llm.plan.derived import DerivedTensor
from rtp_llm.plan.plan import Delivery, LoadPlan


@dataclass(frozen=True, slots=True)
class Budget:
    """What one rank's plan takes on its device by one transport, in bytes.

    ``resident``: the parameters.  ``staging``: the transport's buffers.  ``derived``: tensors that parameters are derived
    from, while they are gathered.  ``transient``: the largest temporary beside all of these.
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
    """Memory for derived tensors while they are gathered.

    ``parts``: those in several reads (enforced).  ``single``: those in one read (bounded by the number of threads).  ``working``:
    working memory of transforms.
    """

    parts: int
    single: int
    working: int

    @property
    def nbytes(self) -> int:
        return self.parts + self.single + self.working


def transient_bytes(deliveries: Iterable[Delivery]) -> int:
    """The largest temporary outside of staging: twice the largest tensor that must be read whole, once for an op's result."""
    return max((2 * d.nbytes for d in deliveries if not d.divisible), default=0)


def content_bytes(tensor: DerivedTensor, delivery: Delivery) -> int:
    """Bytes of a derived tensor in its stored dtype."""
    return volume(tensor.region) * DTYPES[delivery.tensor.dtype].bits // 8


def staging_limits(plan: LoadPlan, reader: ReaderLimits) -> StagingLimits:
    """The limits for threads that go through a plan's deliveries in order.

    Room for two of the largest tensors: one is gathered while another one is transformed.  At least one tensor and a buffer for each
    thread: a lower limit would stop threads.
    """
    if not plan.derived:
        return StagingLimits(0, 0, 0)
    staged = [(content_bytes(tensor, d), tensor, d) for tensor, d in derived_deliveries(plan)]
    several = [nbytes for nbytes, _, d in staged if d.nbytes > reader.buffer_bytes and d.divisible]
    # An indivisible tensor is read whole; those larger than a buffer come one at a time.  An op holds a second copy.
    undivided = max((2 * nbytes for nbytes, _, d in staged if d.nbytes > reader.buffer_bytes and not d.divisible), default=0)
    small = [nbytes for nbytes, _, d in staged if d.nbytes <= reader.buffer_bytes]
    largest = max(several, default=0)
    parts = min(sum(several), largest + max(largest, reader.threads * reader.buffer_bytes))
    single = undivided + min(sum(small), reader.threads * max(small, default=0))
    working = max((tensor.transform.working_bytes(tensor.region, reader.step_bytes) for _, tensor, _ in staged), default=0)
    return StagingLimits(parts, single, min(reader.derivers, len(staged)) * working)


def held_bytes(parts: Iterable[Delivery], derived: Mapping[str, DerivedTensor], step_bytes: int) -> int:
    """The most that one thread holds if it places ``parts`` in this order: incomplete tensors, and one transform's working memory."""
    left: dict[str, int] = {}
    held = most = 0
    for part in parts:
        for target in part.targets:
            tensor = derived.get(target.param)
            if tensor is None:
                continue
            if tensor.name not in left:
                left[tensor.name] = volume(tensor.region)
                held += content_bytes(tensor, part)
            most = max(most, held)
            left[tensor.name] -= prod(extent(target.box))
            if not left[tensor.name]:
                most = max(most, held + tensor.transform.working_bytes(tensor.region, step_bytes))
                held -= content_bytes(tensor, part)
    return most


def derived_deliveries(plan: LoadPlan) -> Iterator[tuple[DerivedTensor, Delivery]]:
    """Each derived tensor with its delivery, in plan order; empty deliveries are left out."""
    if plan.derived:  # most plans have none, and many deliveries
        for delivery in plan.deliveries:
            for target in delivery.targets:
                if target.param in plan.derived and delivery.nbytes:
                    yield plan.derived[target.param], delivery
