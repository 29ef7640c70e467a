"""Embeddings and the LM head, over a vocabulary that is split between ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.errors import Problem
from rtp_llm.layers.base import Planned
from rtp_llm.layers.faults import ForwardError, LayerFault
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.parallel.shard import vocab
from rtp_llm.plan.boxes import whole
from rtp_llm.plan.pieces import Fill, Piece


class VocabParallelEmbedding(Planned):
    """A table split by rows: contiguous shares of the padded vocabulary, in rank order.

    Parameter: ``weight [padded vocabulary / tp, hidden]``; padding rows are zeros.  Ids must be in ``[0, vocab_size)``; the model
    checks them, since a rank cannot tell a bad id from another rank's.
    """

    weight: nn.Parameter

    def __init__(self, slot: str, vocab_size: int, hidden_size: int, *, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.tp = tp
        self.span, self.padding = vocab(vocab_size, tp.size, tp.rank)
        self.declare("weight", (self.span[1] - self.span[0] + self.padding, hidden_size), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        start, stop = self.span
        real, columns = stop - start, (0, self.hidden_size)
        # Also if it is empty: this rank's share may be all padding.
        rows = Piece(f"{self.slot}.weight", (self.vocab_size, self.hidden_size), (self.span, columns), ((0, real), columns))
        tiles: list[Piece | Fill] = [rows]
        if self.padding:
            tiles.append(Fill(((real, real + self.padding), columns)))
        return {"weight": tuple(tiles)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids [...] -> [..., hidden]``, the same on all ranks."""
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        start, stop = self.span
        foreign = (ids < start) | (ids >= stop)
        rows = F.embedding((ids - start).masked_fill(foreign, 0), self.weight)
        return self.tp.all_reduce(rows.masked_fill(foreign[..., None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [..., hidden] -> [..., vocab_size]``: scores of the real vocabulary, the same on all ranks.

        A tied head is this method: embedding and head are one module.
        """
        return self.tp.all_gather(F.linear(hidden, self.weight))[..., : self.vocab_size]

    def extra_repr(self) -> str:
        return f"{self.slot}[{self.span[0]}:{self.span[1]}] + {self.padding} padding rows of {self.vocab_size}, hidden={self.hidden_size}"


class ParallelLMHead(VocabParallelEmbedding):
    """An untied head; a tied one is the embedding's ``logits``."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [..., hidden] -> [..., vocab_size]``."""
        return self.logits(hidden)


class ReplicatedEmbedding(Planned):
    """A small table, whole on every rank: learned positions, token types.  Parameter: ``weight [rows, hidden]``."""

    weight: nn.Parameter

    def __init__(self, slot: str, rows: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.rows = rows
        self.declare("weight", (rows, hidden_size), dtype)

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        shape = tuple(self.weight.shape)
        return {"weight": (Piece(f"{self.slot}.weight", shape, whole(shape), whole(shape)),)}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


def check_ids(name: str, ids: torch.Tensor, size: int) -> None:
    """Refuses ids outside ``[0, size)``.  Reads the tensor, so on CUDA it waits for the stream.

    Raises:
        ForwardError: ``BAD_INPUT``.
    """
    if not ids.numel():
        return
    low, high = map(int, torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ForwardError(
            Problem(LayerFault.BAD_INPUT, f"{name} outside the table", tensor=name, expected=f"0 to {size - 1}", actual=f"{low} to {high}")
        )


def check_batch(name: str, ids: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuses anything but whole numbers ``[batch, seq]`` (or of exactly ``shape``), both at least 1.

    Raises:
        ForwardError: ``BAD_INPUT``.
    """
    fits = tuple(ids.shape) == shape if shape is not None else ids.dim() == 2 and ids.numel() > 0
    if not fits or ids.is_floating_point() or ids.is_complex():
        wanted = "[batch, seq], neither of them 0" if shape is None else str(list(shape))
        raise ForwardError(
            Problem(
                LayerFault.BAD_INPUT,
                f"{name} has another form",
                tensor=name,
                expected=f"whole numbers {wanted}",
                actual=f"{str(ids.dtype).removeprefix('torch.')} {list(ids.shape)}",
            )
        )
