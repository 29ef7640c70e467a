"""Device memory of a load in chunks, beside the parameters: pure arithmetic over its sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rtp_llm.config.load import StackedMode
from rtp_llm.plan.budget import held_bytes
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.fastsafetensors.sequence import (
    Chunk,
    FilePiece,
    Split,
    group_order,
    local_chunks,
    narrowed,
    resident_chunks,
)

#: Chunks in the order in which they are delivered, each with the rank that reads it.
Order = Sequence[tuple[int, Chunk]]


class Wanted:
    """The deliveries of one rank, by tensor and by expert."""

    def __init__(self, plan: LoadPlan) -> None:
        self.by_name: defaultdict[str, list[Delivery]] = defaultdict(list)
        self.by_expert: defaultdict[tuple[str, int], list[Delivery]] = defaultdict(list)
        for delivery in plan.deliveries:
            if delivery.nbytes:
                self.by_name[delivery.tensor.name].append(delivery)
                if delivery.raw_box:
                    self.by_expert[delivery.tensor.name, delivery.raw_box[0][0]].append(delivery)

    def of_piece(self, piece: FilePiece) -> Iterator[Delivery]:
        """The parts of deliveries that a piece holds."""
        name = piece.tensor.name
        # A layer's experts are many, and each wants one row.
        one = piece.split is Split.EXPERTS
        for delivery in self.by_expert.get((name, piece.box[0][0]), ()) if one else self.by_name.get(name, ()):
            part = narrowed(delivery, piece.box)
            if part is not None:
                yield part


def order_of(plan: LoadPlan, mode: StackedMode, chunk_bytes: int, ranks: int) -> Order:
    """The sequence that a group of ``ranks`` reads, the same on all of them; for one rank its own."""
    if ranks == 1:
        return tuple((0, chunk) for chunk in local_chunks(plan, mode, chunk_bytes))
    return group_order(plan, mode, chunk_bytes, ranks)


def received_bytes(order: Order, rank: int) -> int:
    """The largest message that another rank sends."""
    return max((m.nbytes for source, chunk in order if source != rank for m in chunk.messages), default=0)


def chunk_staging_bytes(order: Order, rank: int, depth: int) -> int:
    """Own chunks, ``depth`` of them at a time, and the largest message from another rank."""
    return resident_chunks([chunk.nbytes for source, chunk in order if source == rank], depth) + received_bytes(order, rank)


def derived_bytes(plan: LoadPlan, order: Order, step_bytes: int) -> int:
    """The most that incomplete derived tensors hold; with several ranks' files side by side there are several at a time."""
    if not plan.derived:
        return 0
    wanted = Wanted(plan)
    pieces = (piece for _, chunk in order for message in chunk.messages for piece in message.pieces)
    return held_bytes((part for piece in pieces for part in wanted.of_piece(piece)), plan.derived, step_bytes)
