"""Dispatches the bytes of a piece to the deliveries that want them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rtp_llm.plan.boxes import Box, extent, shift, view
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.fastsafetensors.memory import Wanted
from rtp_llm.transport.fastsafetensors.sequence import FilePiece, Message
from rtp_llm.transport.interface import Sink
from rtp_llm.transport.stored import as_stored


class Dispatcher:
    """Places arriving bytes by one rank's plan; ``kept_bytes`` counts those of the plan."""

    def __init__(self, plan: LoadPlan, sink: Sink, device: torch.device) -> None:
        self._sink = sink
        self.kept_bytes = 0
        self._wanted = Wanted(plan)
        for delivery in plan.deliveries:
            if not delivery.nbytes:
                # No file holds a byte of it.
                dtype = getattr(torch, str(delivery.stored_dtype))
                sink.place(delivery, torch.empty(extent(delivery.raw_box), dtype=dtype, device=device))

    def take(self, message: Message, flat: torch.Tensor) -> int:
        """Places the wanted part of a message's bytes (``uint8``, flat); returns its bytes."""
        wanted: list[tuple[Delivery, torch.Tensor]] = []
        for piece in message.pieces:
            offset = piece.start - message.start
            wanted += self._of_piece(piece, flat[offset : offset + piece.stop - piece.start])
        return self._place(wanted)

    def _of_piece(self, piece: FilePiece, flat: torch.Tensor) -> Iterator[tuple[Delivery, torch.Tensor]]:
        content: torch.Tensor | None = None
        for part in self._wanted.of_piece(piece):
            content = as_stored(piece.tensor, piece.box, flat) if content is None else content
            yield part, view(content, _from(piece.box, part.raw_box))

    def _place(self, wanted: list[tuple[Delivery, torch.Tensor]]) -> int:
        if wanted:
            self._sink.place_all(wanted)
        nbytes = sum(part.nbytes for part, _ in wanted)
        self.kept_bytes += nbytes
        return nbytes

    def take_whole(self, name: str, content: torch.Tensor) -> int:
        """Places the wanted part of a whole tensor; returns its bytes, 0 for an unknown name."""
        return self._place([(delivery, view(content, delivery.raw_box)) for delivery in self._wanted.by_name.get(name, ())])

    def take_expert(self, name: str, expert: int, content: torch.Tensor) -> int:
        """The same for one expert of a stacked tensor, without the dimension of experts."""
        return self._place([(d, view(content, d.raw_box[1:])[None]) for d in self._wanted.by_expert.get((name, expert), ())])


def _from(origin: Box, box: Box) -> Box:
    return shift(box, tuple(-a for a, _ in origin))
