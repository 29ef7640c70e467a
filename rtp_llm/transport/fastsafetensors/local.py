"""One process: chunks from files into parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from rtp_llm.errors import TransportError
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig
from rtp_llm.transport.fastsafetensors.failure import FastsafetensorsFailure, Witness
from rtp_llm.transport.fastsafetensors.hand import Hand
from rtp_llm.transport.fastsafetensors.sequence import Chunk
from rtp_llm.transport.interface import Moved, Progress, Sink

if TYPE_CHECKING:
    from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

_log = logging.getLogger("rtp_llm.transport")


@dataclass(frozen=True, slots=True)
class Means:
    """What every way of using the package needs: where the files are, where weights go, the package's settings, its
    threads, and for each file whether to read it around the page cache."""

    directory: str
    device: torch.device
    config: EffectiveConfig
    threads: int
    direct: Mapping[str, bool]


def settled(device: torch.device) -> None:
    """Waits for the work queued on the current stream: what was borrowed for it may be given back."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def open_chunks(means: Means, chunks: Sequence[Chunk], witness: Witness, *, overlap: bool) -> ChunkReader:
    """A reader of ``chunks``; with ``overlap`` it hands out the beginning of a chunk while the rest is still being read."""
    with witness.watching():
        # Imported only here: the package is there because the probe has found it.
        from rtp_llm.transport.fastsafetensors.pipeline import ChunkReader

        return ChunkReader(
            means.config, means.device, chunks, means.directory, means.direct, witness, threads=means.threads, overlap=overlap
        )


class Ending:
    """Closes a reader at the end of the context.

    A failure to close is told and nothing more: either all weights are in place, or another error came first and must
    not be hidden.
    """

    def __init__(self, close: Callable[[], None], witness: Witness) -> None:
        self._close, self._witness = close, witness

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._witness.watching():
                self._close()
        except (FastsafetensorsFailure, TransportError) as failure:
            _log.warning("fastsafetensors could not be closed: %s", failure)


class LocalTransport:
    """Reads what one rank needs, in ``chunks``, and places it from there.

    Raises on ``deliver``, besides data errors, :class:`FastsafetensorsFailure`.
    """

    name = "fastsafetensors"

    def __init__(self, means: Means, chunks: tuple[Chunk, ...]) -> None:
        self._means, self._chunks = means, chunks

    def deliver(self, plan: LoadPlan, sink: Sink, progress: Progress, check: Callable[[], None]) -> Moved:
        means = self._means
        hand = Hand(plan, sink, means.device)
        witness = Witness(means.directory, plan.catalog.files)
        reader = open_chunks(means, self._chunks, witness, overlap=True)
        with Ending(reader.close, witness):
            while (item := reader.next()) is not None:
                check()
                message, flat = item
                progress.advance(hand.take(message, flat))
                settled(means.device)
                del item, flat
        return Moved(sum(chunk.nbytes for chunk in self._chunks), hand.kept_bytes, 0, hand.kept_bytes)
