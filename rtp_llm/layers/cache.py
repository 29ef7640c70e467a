"""The KV cache: pages that sequences take as they grow, and states of fixed size for layers with linear attention.

A pass takes effect in :meth:`PagedCache.advance`.  One that fails before leaves lengths, pages and states unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.errors import Problem, internal
from rtp_llm.kernels.paging import PAGE_SIZE, SAFE_PAGE, HostRows, PagedRows, pages_for
from rtp_llm.layers.faults import ForwardError, LayerFault

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What one layer caches on this rank.  ``tokens``: shapes for each token, in the model's dtype.  ``states``: shapes and
    dtypes for each sequence (None: the model's dtype)."""

    tokens: tuple[Shape, ...] = ()
    states: tuple[tuple[Shape, torch.dtype | None], ...] = ()

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page."""
        return PAGE_SIZE * dtype.itemsize * sum(map(_elements, self.tokens))

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence's states."""
        return sum(_elements(shape) * (own or dtype).itemsize for shape, own in self.states)


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much a cache holds: ``rows`` sequences of up to ``max_length`` tokens, in ``pages`` pages together."""

    rows: int
    pages: int
    max_length: int

    @classmethod
    def equal(cls, batch: int, max_length: int) -> CacheSize:
        """Pages for ``batch`` sequences of ``max_length`` tokens each."""
        return cls(batch, batch * pages_for(max_length), max_length)

    def nbytes(self, layers: Iterable[CacheShape], dtype: torch.dtype) -> int:
        """Bytes of the cache, with the safe page and the spare row of states."""
        return sum((self.pages + 1) * layer.page_bytes(dtype) + (self.rows + 1) * layer.row_bytes(dtype) for layer in layers)


class PagedCache:
    """Pages ``[pages, PAGE_SIZE, ...]`` of each layer, and which of them belong to which sequence.

    A sequence has a *cache row* from :meth:`take` to :meth:`release`.  A forward pass starts with :meth:`begin`, which finds
    pages for its tokens or refuses it.  Each layer writes with :meth:`write` and :meth:`keep`; :meth:`settle` and
    :meth:`advance` commit the pass.  Page 0 belongs to no sequence.  One pass at a time.
    """

    def __init__(self, layers: Iterable[CacheShape], size: CacheSize, *, dtype: torch.dtype, device: torch.device | str) -> None:
        if min(size.rows, size.pages, size.max_length) < 1:
            raise ForwardError(
                Problem(
                    LayerFault.BAD_INPUT,
                    "a cache without room",
                    expected="batch, pages and max_length >= 1",
                    actual=f"{size.rows}, {size.pages} and {size.max_length}",
                )
            )
        self.size = size
        self.device = torch.device(device)
        shapes = tuple(layers)
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            # Zeros: padding rows of a batch must not read NaN.
            self.pages = [
                [torch.zeros(size.pages + 1, PAGE_SIZE, *shape, dtype=dtype, device=device) for shape in s.tokens] for s in shapes
            ]
            self.states = [
                [torch.zeros(size.rows + 1, *shape, dtype=own or dtype, device=device) for shape, own in s.states] for s in shapes
            ]
            width = min(pages_for(size.max_length), size.pages)
            self._tables = torch.full((size.rows, width), SAFE_PAGE, dtype=torch.int32)
        self._held = [0] * size.rows
        self._lengths = [0] * size.rows
        self._taken = [False] * size.rows
        # Taken from the end, so tables of a new cache count upwards, which is easy to read.
        self._free = list(range(size.pages, 0, -1))
        self._open: tuple[HostRows, list[tuple[int, list[int]]]] | None = None
        self._next: dict[int, tuple[torch.Tensor, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies."""
        return sum(t.nbytes for of in (*self.pages, *self.states) for t in of)

    @property
    def free_pages(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def free_rows(self) -> int:
        """The number of free cache rows."""
        return self._taken.count(False)

    @property
    def spare(self) -> int:
        """The cache row of padding rows of a batch."""
        return self.size.rows

    @property
    def width(self) -> int:
        """Pages that one sequence can have."""
        return self._tables.shape[1]

    @property
    def length(self) -> int:
        """Tokens of each sequence; all must have the same number."""
        (length,) = {self._lengths[cache_row] for cache_row in self._in_use()}
        return length

    def lengths(self, cache_rows: Sequence[int]) -> list[int]:
        """Tokens of each of these sequences."""
        return [self._lengths[cache_row] for cache_row in cache_rows]

    def _in_use(self) -> tuple[int, ...]:
        return tuple(cache_row for cache_row, taken in enumerate(self._taken) if taken)

    def take(self, length: int = 0) -> int:
        """Takes a free cache row for a new sequence, with pages for ``length`` tokens.

        Raises:
            ForwardError: ``NO_CACHE_ROW`` or ``NO_PAGES``.
        """
        if not self.free_rows:
            raise ForwardError(
                Problem(
                    LayerFault.NO_CACHE_ROW,
                    "all rows of the cache are taken",
                    expected="a free cache row",
                    actual=f"{self.size.rows} sequences",
                    fix="release one, or ask new_cache for more",
                )
            )
        if length > self.size.max_length:
            raise self._too_long(length, self.size.max_length, 0)
        if pages_for(length) > len(self._free):
            raise self._no_pages(pages_for(length))
        cache_row = self._taken.index(False)
        self._taken[cache_row] = True
        for state in self.states:
            for tensor in state:
                tensor[cache_row].zero_()
        self._grow(cache_row, [self._free.pop() for _ in range(pages_for(length))])
        return cache_row

    def release(self, cache_row: int) -> None:
        """Removes a sequence and frees its pages."""
        if not self._taken[cache_row]:
            raise ForwardError(internal(LayerFault.INTERNAL, "a cache row is released that no sequence has taken", actual=cache_row))
        self._free += reversed(self._tables[cache_row, : self._held[cache_row]].tolist())
        self._held[cache_row] = self._lengths[cache_row] = 0
        self._taken[cache_row] = False

    def reset(self) -> None:
        """Removes the tokens of all sequences, which keep their cache rows; no memory is freed."""
        for cache_row in self._in_use():
            self.release(cache_row)
            self.take()
        self._open = None
        self._next.clear()

    def begin(self, batch: int, tokens: int, cache_rows: Sequence[int] | None = None) -> HostRows:
        """The pass that adds ``tokens`` tokens to each of ``cache_rows``, one a row; None: all that are taken.

        Raises:
            ForwardError: ``BAD_INPUT``, ``CACHE_TOO_SMALL`` or ``NO_PAGES``; nothing has changed then.
        """
        chosen = self._in_use() if cache_rows is None else tuple(cache_rows)
        if len(chosen) != batch:
            raise ForwardError(
                Problem(LayerFault.BAD_INPUT, "the cache was made for another batch", expected=str(len(chosen)), actual=str(batch))
            )
        if len(set(chosen)) != batch or not set(chosen) <= set(self._in_use()):
            raise ForwardError(
                Problem(LayerFault.BAD_INPUT, "cache rows of no sequence", expected=f"each once of {self._in_use()}", actual=str(chosen))
            )
        longest = max(self._lengths[cache_row] for cache_row in chosen)
        if longest + tokens > self.size.max_length:
            raise self._too_long(tokens, self.size.max_length - longest, longest)
        wanted = {cache_row: pages_for(self._lengths[cache_row] + tokens) for cache_row in chosen}
        growth = {cache_row: max(0, count - self._held[cache_row]) for cache_row, count in wanted.items()}
        total = sum(growth.values())
        if total > len(self._free):
            raise self._no_pages(total)
        tables = self._tables[list(chosen), : max(wanted.values())]
        fresh = self._free[len(self._free) - total :][::-1]
        grown: list[tuple[int, list[int]]] = []
        for row, (cache_row, count) in enumerate(growth.items()):
            if count:
                pages, fresh = fresh[:count], fresh[count:]
                grown.append((cache_row, pages))
                tables[row, self._held[cache_row] : wanted[cache_row]] = torch.tensor(pages, dtype=torch.int32)
        rows = HostRows(tokens, chosen, tuple(self._lengths[cache_row] for cache_row in chosen), tables)
        self._open = rows, grown
        self._next.clear()
        return rows

    def write(self, layer: int, rows: PagedRows, *values: torch.Tensor) -> list[torch.Tensor]:
        """Writes ``values`` of the new tokens, each ``[tokens of all rows, ...]``, to the pages of ``layer``; returns the pages."""
        pages = self.pages[layer]
        for held, value in zip(pages, values, strict=True):
            held.flatten(0, 1)[rows.places] = value
        return pages

    def kept(self, layer: int, rows: PagedRows) -> list[torch.Tensor]:
        """The states of ``layer`` before the pass, each ``[rows, ...]``."""
        return [state[rows.cache_rows] for state in self.states[layer]]

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """Stores the states of ``layer`` after the pass, for :meth:`settle`."""
        self._next[layer] = states

    def settle(self, rows: PagedRows) -> None:
        """Writes the stored states to the cache: the last step of a pass on the device."""
        for layer, states in self._next.items():
            for held, state in zip(self.states[layer], states, strict=True):
                held[rows.cache_rows] = state
        self._next.clear()

    def advance(self, rows: HostRows) -> None:
        """Commits the tokens of a pass that every layer has written."""
        if self._open is None or self._open[0] is not rows:
            raise ForwardError(internal(LayerFault.INTERNAL, "the KV cache is to commit a pass that was not begun"))
        for cache_row, pages in self._open[1]:
            self._grow(cache_row, pages)
            del self._free[len(self._free) - len(pages) :]
        for cache_row, length in zip(rows.cache_rows, rows.lengths, strict=True):
            self._lengths[cache_row] = length
        self._open = None

    def _grow(self, cache_row: int, pages: list[int]) -> None:
        held = self._held[cache_row]
        self._tables[cache_row, held : held + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._held[cache_row] = held + len(pages)

    def _too_long(self, tokens: int, room: int, past: int) -> ForwardError:
        return ForwardError(
            Problem(
                LayerFault.CACHE_TOO_SMALL,
                "the tokens do not fit the cache",
                expected=f"at most {room} more tokens" if past else f"at most {room} more tokens, in an empty cache row",
                actual=str(tokens),
                fix="ask new_cache for a larger max_length",
            )
        )

    def _no_pages(self, wanted: int) -> ForwardError:
        return ForwardError(
            Problem(
                LayerFault.NO_PAGES,
                "the cache has no pages for these tokens",
                expected=f"{wanted} free pages of {PAGE_SIZE} tokens",
                actual=f"{len(self._free)} of {self.size.pages}",
                fix="release a sequence, or ask new_cache for more pages",
            )
        )
