"""A group of processes: each file is read once, by one of them, and its bytes are broadcast.

All ranks follow one sequence of messages.  The reading rank of a chunk first broadcasts one byte: read, or failed.  So a package
that fails on one rank ends the sequence on all ranks at the same place, and all fall back together.  A data error, or a rank
that dies, ends the load through the watch.  A rank drops what it does not want; no collective depends on it.
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
from rtp_llm.transport.fastsafetensors.config import ReaderContext
from rtp_llm.transport.fastsafetensors.dispatch import Dispatcher
from rtp_llm.transport.fastsafetensors.failure import FailureDiagnoser, FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.local import Closing, open_chunks, settled
from rtp_llm.transport.fastsafetensors.memory import Order, received_bytes
from rtp_llm.transport.fastsafetensors.sequence import Chunk, Message, sequence_lines
from rtp_llm.transport.interface import Progress, Sink, TransferStats

if TYPE_CHECKING:
    from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

_READ, _FAILED = 1, 0


class GroupTransport:
    """Reads and broadcasts ``order``, the group's sequence of chunks, each with the rank that reads it.

    ``terms``: what else ranks must have in common.  ``deliver`` raises data errors, other ranks' errors, and
    :class:`FastsafetensorsFailure`, the same on all ranks.
    """

    name = "fastsafetensors"

    def __init__(self, context: ReaderContext, order: Order, terms: str, world: World, watch: Watch) -> None:
        self._context, self._order, self._terms = context, order, terms
        self._world, self._watch = world, watch

    @property
    def _own(self) -> list[Chunk]:
        return [chunk for rank, chunk in self._order if rank == self._world.rank]

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> TransferStats:
        agree(self._watch, digest(self._lines()), self._lines)
        diagnoser = FailureDiagnoser(self._context.directory, plan.catalog.files)
        reader, reason = self._open(diagnoser)
        self._go_on_together(reason)
        assert reader is not None
        with Closing(reader.close, diagnoser), self._group() as group, meeting(self._world, self._watch):
            dispatcher = Dispatcher(plan, sink, self._context.device)
            reason = self._pass_on(reader, dispatcher, group, progress, check)
        self._go_on_together(reason)
        return TransferStats(sum(chunk.nbytes for chunk in self._own), dispatcher.kept_bytes, 0, dispatcher.kept_bytes)

    def _lines(self) -> Iterator[str]:
        return sequence_lines(self._order, self._terms)

    def _open(self, diagnoser: FailureDiagnoser) -> tuple[ChunkReader | None, str]:
        try:
            # Without overlap: a chunk is returned once all of it is read, so reading it cannot fail later.
            return open_chunks(self._context, self._own, diagnoser, overlap=False), ""
        except FastsafetensorsFailure as failure:
            return None, str(failure)

    def _go_on_together(self, reason: str) -> None:
        """Raises on all ranks if any of them gives a reason."""
        replies = [text.decode() for text in self._watch.exchange(reason.encode())]
        found = [f"rank {rank}: {text}" for rank, text in enumerate(replies) if text]
        if found:
            raise FastsafetensorsFailure("; ".join(found))

    def _group(self) -> AbstractContextManager[dist.ProcessGroup]:
        if self._context.device.type == "cpu":
            return host_group(self._world, self._watch)
        everyone = dist.group.WORLD
        assert everyone is not None, "a group of one has no group transport"
        return nullcontext(everyone)

    def _pass_on(
        self, reader: ChunkReader, dispatcher: Dispatcher, group: dist.ProcessGroup, progress: Progress, check: Callable[[], None]
    ) -> str:
        """Broadcasts the sequence; returns why this rank failed, or nothing.  Ends at the first failure of any rank."""
        device = self._context.device
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
                    # This rank has reported the whole chunk as read; the others wait for a message that will not come.
                    raise AssertionError(f"fastsafetensors lost a message of a chunk: {reason}")
                content = buffer[: message.nbytes] if flat is None else flat
                broadcast_bytes(content, source, group, check)
                progress.advance(dispatcher.take(message, content))
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
            return None, "it delivered other messages than were requested"
        return item[1], ""
