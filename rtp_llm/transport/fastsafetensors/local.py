"""One process: chunks from files into parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from rtp_llm.errors import TransportError
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.fastsafetensors.config import ReaderContext
from rtp_llm.transport.fastsafetensors.dispatch import Dispatcher
from rtp_llm.transport.fastsafetensors.failure import FailureDiagnoser, FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.sequence import Chunk
from rtp_llm.transport.interface import Progress, Sink, TransferStats

if TYPE_CHECKING:
    from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

_log = logging.getLogger("rtp_llm.transport")


def settled(device: torch.device) -> None:
    """Waits for the work queued on the current stream, so that its buffers may be reused."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def open_chunks(context: ReaderContext, chunks: Sequence[Chunk], diagnoser: FailureDiagnoser, *, overlap: bool) -> ChunkReader:
    """A reader of ``chunks``; with ``overlap`` it returns the beginning of a chunk while the rest is still being read."""
    with diagnoser.watching():
        # Imported only here, after the probe has found the package.
        from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

        return ChunkReader(context, chunks, diagnoser, overlap=overlap)


class Closing:
    """Closes a reader at the end of the context.

    A failure to close is only logged: either all weights are in place, or an earlier error must not be hidden.
    """

    def __init__(self, close: Callable[[], None], diagnoser: FailureDiagnoser) -> None:
        self._close, self._diagnoser = close, diagnoser

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._diagnoser.watching():
                self._close()
        except (FastsafetensorsFailure, TransportError) as failure:
            _log.warning("fastsafetensors could not be closed: %s", failure)


class LocalTransport:
    """Reads one rank's ``chunks`` and places them.

    Raises on ``deliver``, besides data errors, :class:`FastsafetensorsFailure`.
    """

    name = "fastsafetensors"

    def __init__(self, context: ReaderContext, chunks: tuple[Chunk, ...]) -> None:
        self._context, self._chunks = context, chunks

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> TransferStats:
        context = self._context
        dispatcher = Dispatcher(plan, sink, context.device)
        diagnoser = FailureDiagnoser(context.directory, plan.catalog.files)
        reader = open_chunks(context, self._chunks, diagnoser, overlap=True)
        with Closing(reader.close, diagnoser):
            while (item := reader.next()) is not None:
                check()
                message, flat = item
                progress.advance(dispatcher.take(message, flat))
                settled(context.device)
                del item, flat
        return TransferStats(sum(chunk.nbytes for chunk in self._chunks), dispatcher.kept_bytes, 0, dispatcher.kept_bytes)
