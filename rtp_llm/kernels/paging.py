"""One pass over sequences whose keys and values are in pages (Kwon et al., 2023, arXiv:2309.06180).

A page holds :data:`PAGE_SIZE` tokens of one sequence; a row's table lists the pages of its sequence, in order.
:class:`HostRows` describes a pass on the host; :class:`PagedRows` is the same on the device, with derived tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Tokens of a page: what paged kernels are tuned for, and at most 15 tokens of waste a sequence.
PAGE_SIZE = 16

#: A page of no sequence: padding rows of a batch read and write it.
SAFE_PAGE = 0


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class HostRows:
    """A pass that adds ``tokens`` tokens to each of its sequences.

    ``cache_rows``: which sequences, one a row; ``past``: the tokens that each has already; ``tables``: their pages, int32 ``[rows,
    width]`` on the CPU, of which a row's first ``pages_for(past + tokens)`` count.
    """

    tokens: int
    cache_rows: tuple[int, ...]
    past: tuple[int, ...]
    tables: torch.Tensor

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence after the pass."""
        return tuple(past + self.tokens for past in self.past)

    def padded(self, rows: int, width: int, spare: int) -> HostRows:
        """The same with ``rows`` rows and tables of ``width`` pages.  Added rows are of cache row ``spare``, have no past, and see
        nothing but the safe page."""
        tables = torch.full((rows, width), SAFE_PAGE, dtype=torch.int32)
        used = min(width, self.tables.shape[1])
        tables[: len(self.cache_rows), :used] = self.tables[:, :used]
        more = rows - len(self.cache_rows)
        return HostRows(self.tokens, (*self.cache_rows, *(spare,) * more), (*self.past, *(0,) * more), tables)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """A pass on the device.

    ``cache_rows [rows]``; ``positions [rows, tokens]`` of the new tokens; ``places [rows * tokens]``, where they go in pages laid one
    behind the other; ``lengths [rows]`` after the pass; ``tables [rows, width]``.  All int64.
    ``keys``: up to how many tokens of a sequence attention has to look at; ``fixed``: the same tensors serve later passes, so
    that nothing but their contents may be decided by them.
    """

    host: HostRows
    cache_rows: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor
    keys: int
    fixed: bool = False

    @classmethod
    def of(cls, host: HostRows, device: torch.device, *, fixed: bool = False) -> PagedRows:
        """What the host describes, in one transfer."""
        numbers = torch.tensor([host.cache_rows, host.past]).T
        packed = torch.cat((numbers, host.tables.long()), dim=1).to(device)
        cache_rows, past, tables = packed[:, 0].contiguous(), packed[:, 1], packed[:, 2:].contiguous()
        positions = past[:, None] + torch.arange(host.tokens, device=device)
        places = tables.gather(1, positions // PAGE_SIZE) * PAGE_SIZE + positions % PAGE_SIZE
        keys = tables.shape[1] * PAGE_SIZE if fixed else max(host.lengths)
        return cls(host, cache_rows, positions, places.flatten(), past + host.tokens, tables, keys, fixed)

    def refilled(self, host: HostRows) -> PagedRows:
        """A later pass of the same sizes in the same tensors: each of their elements is written anew."""
        assert self.fixed and self.tables.shape == host.tables.shape and self.host.tokens == host.tokens
        later = PagedRows.of(host, self.tables.device, fixed=True)
        for name in ("cache_rows", "positions", "places", "lengths", "tables"):
            getattr(self, name).copy_(getattr(later, name))
        return PagedRows(host, self.cache_rows, self.positions, self.places, self.lengths, self.tables, self.keys, True)
