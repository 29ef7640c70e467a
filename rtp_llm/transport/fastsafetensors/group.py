"""A group of processes: each file is read once, by one of them, and its bytes are broadcast.

All ranks go through one sequence of messages.  The rank that reads a chunk first says, in one byte, whether it could: so a
package that fails on one rank ends the sequence on all ranks at the same place, and they go another way together.  A data
error, and a rank that dies, end the load through the watch.  What a rank does not want it drops at once: no collective
depends on what a rank keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rtp_llm.parallel.watch import Watch
from rtp_llm.parallel.wire import broadcast_bytes
from rtp_llm.parallel.world import World, agree, host_group, meeting
from rtp_llm.plan.plan import LoadPlan, digest
from rtp_llm.transport.fastsafetensors.failure import FastsafetensorsFailure, Witness
from rtp_llm.transport.fastsafetensors.hand import Hand
from rtp_llm.transport.fastsafetensors.local import Ending, Means, open_chunks, settled
from rtp_llm.transport.fastsafetensors.memory import Order, received_bytes
from rtp_llm.transport.fastsafetensors.sequence import Chunk, Message, agreement_lines
from rtp_llm.transport.interface import Moved, Progress, Sink

if TYPE_CHECKING:
    from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

_READ, _FAILED = 1, 0


class GroupTransport:
    """Reads and passes on ``order``, the group's sequence of chunks, each with the rank that reads it.

    ``terms`` are what ranks must have in common besides.  Raises on ``deliver``, besides data errors and errors of other
    ranks, :class:`FastsafetensorsFailure`, on all ranks alike.
    """

    name = "fastsafetensors"

    def __init__(self, means: Means, order: Order, terms: str, world: World, watch: Watch) -> None:
        self._means, self._order, self._terms = means, order, terms
        self._world, self._watch = world, watch

    @property
    def _own(self) -> list[Chunk]:
        return [chunk for rank, chunk in self._order if rank == self._world.rank]

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        agree(self._watch, digest(self._lines()), self._lines)
        witness = Witness(self._means.directory, plan.catalog.files)
        reader, reason = self._open(witness)
        self._go_on_together(reason)
        assert reader is not None
        with Ending(reader.close, witness), self._group() as group, meeting(self._world, self._watch):
            hand = Hand(plan, sink, self._means.device)
            reason = self._pass_on(reader, hand, group, progress, check)
        self._go_on_together(reason)
        return Moved(sum(chunk.nbytes for chunk in self._own), hand.kept_bytes, 0, hand.kept_bytes)

    def _lines(self) -> Iterator[str]:
        return agreement_lines(self._order, self._terms)

    def _open(self, witness: Witness) -> tuple[ChunkReader | None, str]:
        try:
            # Without overlap: a chunk is handed out when it has been read whole, and not when reading it may yet fail.
            return open_chunks(self._means, self._own, witness, overlap=False), ""
        except FastsafetensorsFailure as failure:
            return None, str(failure)

    def _go_on_together(self, reason: str) -> None:
        """Raises on all ranks alike if any of them has a reason not to go on."""
        told = [text.decode() for text in self._watch.exchange(reason.encode())]
        found = [f"rank {rank}: {text}" for rank, text in enumerate(told) if text]
        if found:
            raise FastsafetensorsFailure("; ".join(found))

    def _group(self) -> AbstractContextManager[dist.ProcessGroup]:
        if self._means.device.type == "cpu":
            return host_group(self._world, self._watch)
        everyone = dist.group.WORLD
        assert everyone is not None, "a group of one has no group transport"
        return nullcontext(everyone)

    def _pass_on(self, reader: ChunkReader, hand: Hand, group: dist.ProcessGroup, progress: Progress, check: Callable[[], None]) -> str:
        """Goes through the sequence; returns why it had to stop, empty on ranks that were only told to."""
        device = self._means.device
        status = torch.zeros(1, dtype=torch.uint8, device=device)
        buffer = torch.empty(received_bytes(self._order, self._world.rank), dtype=torch.uint8, device=device)
        for source, chunk in self._order:
            mine, reason = source == self._world.rank, ""
            for number, message in enumerate(chunk.messages):
                check()
                flat: torch.Tensor | None = None
                if mine:
                    flat, reason = self._read(reader, message)
                if number == 0:
                    status.fill_(_FAILED if reason else _READ)
                    broadcast_bytes(status, source, group, check)
                    if int(status.item()) == _FAILED:
                        return reason
                if reason:
                    # It has said that all of the chunk was there; the others wait for what will not come.
                    raise AssertionError(f"fastsafetensors lost a message of a chunk: {reason}")
                content = buffer[: message.nbytes] if flat is None else flat
                broadcast_bytes(content, source, group, check)
                progress.advance(hand.take(message, content))
                settled(device)
                del flat, content
        return ""

    @staticmethod
    def _read(reader: ChunkReader, message: Message) -> tuple[torch.Tensor | None, str]:
        try:
            item = reader.next()
        except FastsafetensorsFailure as failure:
            return None, str(failure)
        if item is None or item[0] != message:
            return None, "it delivered other messages than it was asked for"
        return item[1], ""
