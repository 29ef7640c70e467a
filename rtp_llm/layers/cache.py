"""The KV cache: pages that sequences take as they grow, and, for layers that have one, a state of fixed size a sequence.

Nothing counts before :meth:`PagedCache.advance`: a pass that fails half-way leaves lengths, pages and states as they were.
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
    """What one layer keeps on this rank: ``tokens``, the shapes of what it keeps of each token, in the model's dtype, and
    ``states``, shape and dtype of what it keeps of each sequence (None: the model's dtype)."""

    tokens: tuple[Shape, ...] = ()
    states: tuple[tuple[Shape, torch.dtype | None], ...] = ()

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page."""
        return PAGE_SIZE * dtype.itemsize * sum(map(_elements, self.tokens))

    def slot_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one sequence's states."""
        return sum(_elements(shape) * (own or dtype).itemsize for shape, own in self.states)


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How much a cache holds: ``slots`` sequences of up to ``max_length`` tokens, in ``pages`` pages together."""

    slots: int
    pages: int
    max_length: int

    @classmethod
    def equal(cls, batch: int, max_length: int) -> CacheSize:
        """Room for ``batch`` sequences, each as long as may be."""
        return cls(batch, batch * pages_for(max_length), max_length)

    def nbytes(self, layers: Iterable[CacheShape], dtype: torch.dtype) -> int:
        """Bytes that such a cache takes: the safe page and the spare row of states included."""
        return sum((self.pages + 1) * layer.page_bytes(dtype) + (self.slots + 1) * layer.slot_bytes(dtype) for layer in layers)


class PagedCache:
    """Pages ``[pages, PAGE_SIZE, ...]`` of each layer, and which of them belong to which sequence.

    A sequence lives in a *slot*, from :meth:`take` to :meth:`release`.  A forward pass is announced with :meth:`begin`, which
    finds room for its tokens or refuses it; each layer writes with :meth:`write` and :meth:`keep`; :meth:`settle` and
    :meth:`advance` make it count.  Page 0 is no sequence's.  One pass at a time.
    """

    def __init__(self, layers: Iterable[CacheShape], size: CacheSize, *, dtype: torch.dtype, device: torch.device | str) -> None:
        if min(size.slots, size.pages, size.max_length) < 1:
            raise ForwardError(
                Problem(
                    LayerFault.BAD_INPUT,
                    "a cache without room",
                    expected="batch, pages and max_length >= 1",
                    actual=f"{size.slots}, {size.pages} and {size.max_length}",
                )
            )
        self.size = size
        self.device = torch.device(device)
        shapes = tuple(layers)
        # Wherever it is made: tensors of inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            # Zeros, not whatever memory holds: what rows that fill up a batch read must be numbers.
            self.pages = [
                [torch.zeros(size.pages + 1, PAGE_SIZE, *shape, dtype=dtype, device=device) for shape in s.tokens] for s in shapes
            ]
            self.states = [
                [torch.zeros(size.slots + 1, *shape, dtype=own or dtype, device=device) for shape, own in s.states] for s in shapes
            ]
            width = min(pages_for(size.max_length), size.pages)
            self._tables = torch.full((size.slots, width), SAFE_PAGE, dtype=torch.int32)
        self._held = [0] * size.slots
        self._lengths = [0] * size.slots
        self._taken = [False] * size.slots
        # The last ones go first: tables of a fresh cache then count upwards, which is easy to read.
        self._free = list(range(size.pages, 0, -1))
        self._open: tuple[HostRows, list[tuple[int, list[int]]]] | None = None
        self._next: dict[int, tuple[torch.Tensor, ...]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the cache occupies."""
        return sum(t.nbytes for of in (*self.pages, *self.states) for t in of)

    @property
    def free_pages(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def free_slots(self) -> int:
        """Slots that may be taken."""
        return self._taken.count(False)

    @property
    def spare(self) -> int:
        """The slot of rows that only fill up a batch."""
        return self.size.slots

    @property
    def width(self) -> int:
        """Pages that one sequence can have."""
        return self._tables.shape[1]

    @property
    def length(self) -> int:
        """Tokens of each sequence, where all have as many."""
        (length,) = {self._lengths[slot] for slot in self._in_use()}
        return length

    def lengths(self, slots: Sequence[int]) -> list[int]:
        """Tokens of each of these sequences."""
        return [self._lengths[slot] for slot in slots]

    def _in_use(self) -> tuple[int, ...]:
        return tuple(slot for slot, taken in enumerate(self._taken) if taken)

    def take(self, length: int = 0) -> int:
        """A free slot, for a new sequence that has pages for ``length`` tokens from the start.

        Raises:
            ForwardError: ``NO_SLOT`` or ``NO_PAGES``.
        """
        if not self.free_slots:
            raise ForwardError(
                Problem(
                    LayerFault.NO_SLOT,
                    "all slots of the cache are taken",
                    expected="a free slot",
                    actual=f"{self.size.slots} sequences",
                    fix="release one, or ask new_cache for more",
                )
            )
        if length > self.size.max_length:
            raise self._too_long(length, self.size.max_length, 0)
        if pages_for(length) > len(self._free):
            raise self._no_pages(pages_for(length))
        slot = self._taken.index(False)
        self._taken[slot] = True
        for state in self.states:
            for tensor in state:
                tensor[slot].zero_()
        self._grow(slot, [self._free.pop() for _ in range(pages_for(length))])
        return slot

    def release(self, slot: int) -> None:
        """Forgets a sequence; its pages are free."""
        if not self._taken[slot]:
            raise ForwardError(internal(LayerFault.INTERNAL, "a slot of the KV cache is given back that nobody has taken", actual=slot))
        self._free += reversed(self._tables[slot, : self._held[slot]].tolist())
        self._held[slot] = self._lengths[slot] = 0
        self._taken[slot] = False

    def reset(self) -> None:
        """Forgets the tokens of all sequences that there are, which keep their slots; the memory stays."""
        for slot in self._in_use():
            self.release(slot)
            self.take()
        self._open = None
        self._next.clear()

    def begin(self, batch: int, tokens: int, slots: Sequence[int] | None = None) -> HostRows:
        """The pass that adds ``tokens`` tokens to each of ``slots``, one a row; None: all slots that are taken.

        Raises:
            ForwardError: ``BAD_INPUT``, ``CACHE_TOO_SMALL`` or ``NO_PAGES``; nothing has changed then.
        """
        chosen = self._in_use() if slots is None else tuple(slots)
        if len(chosen) != batch:
            raise ForwardError(
                Problem(LayerFault.BAD_INPUT, "the cache was made for another batch", expected=str(len(chosen)), actual=str(batch))
            )
        if len(set(chosen)) != batch or not set(chosen) <= set(self._in_use()):
            raise ForwardError(
                Problem(LayerFault.BAD_INPUT, "slots that are no sequences", expected=f"each once of {self._in_use()}", actual=str(chosen))
            )
        longest = max(self._lengths[slot] for slot in chosen)
        if longest + tokens > self.size.max_length:
            raise self._too_long(tokens, self.size.max_length - longest, longest)
        wanted = {slot: pages_for(self._lengths[slot] + tokens) for slot in chosen}
        growth = {slot: max(0, count - self._held[slot]) for slot, count in wanted.items()}
        total = sum(growth.values())
        if total > len(self._free):
            raise self._no_pages(total)
        tables = self._tables[list(chosen), : max(wanted.values())]
        fresh = self._free[len(self._free) - total :][::-1]
        grown: list[tuple[int, list[int]]] = []
        for row, (slot, count) in enumerate(growth.items()):
            if count:
                pages, fresh = fresh[:count], fresh[count:]
                grown.append((slot, pages))
                tables[row, self._held[slot] : wanted[slot]] = torch.tensor(pages, dtype=torch.int32)
        rows = HostRows(tokens, chosen, tuple(self._lengths[slot] for slot in chosen), tables)
        self._open = rows, grown
        self._next.clear()
        return rows

    def write(self, layer: int, rows: PagedRows, *values: torch.Tensor) -> list[torch.Tensor]:
        """Puts what ``layer`` keeps of the new tokens, each ``[tokens of all rows, ...]``, in its pages; returns the pages."""
        pages = self.pages[layer]
        for held, value in zip(pages, values, strict=True):
            held.flatten(0, 1)[rows.places] = value
        return pages

    def kept(self, layer: int, rows: PagedRows) -> list[torch.Tensor]:
        """The states of ``layer`` before the pass, each ``[rows, ...]``."""
        return [state[rows.slots] for state in self.states[layer]]

    def keep(self, layer: int, *states: torch.Tensor) -> None:
        """Puts aside the states of ``layer`` after the pass."""
        self._next[layer] = states

    def settle(self, rows: PagedRows) -> None:
        """Takes on the states that were put aside: the last that a pass does on the device."""
        for layer, states in self._next.items():
            for held, state in zip(self.states[layer], states, strict=True):
                held[rows.slots] = state
        self._next.clear()

    def advance(self, rows: HostRows) -> None:
        """Counts the tokens of a pass that every layer has written."""
        if self._open is None or self._open[0] is not rows:
            raise ForwardError(internal(LayerFault.INTERNAL, "the KV cache is to count a pass that was not begun"))
        for slot, pages in self._open[1]:
            self._grow(slot, pages)
            del self._free[len(self._free) - len(pages) :]
        for slot, length in zip(rows.slots, rows.lengths, strict=True):
            self._lengths[slot] = length
        self._open = None

    def _grow(self, slot: int, pages: list[int]) -> None:
        held = self._held[slot]
        self._tables[slot, held : held + len(pages)] = torch.tensor(pages, dtype=torch.int32)
        self._held[slot] = held + len(pages)

    def _too_long(self, tokens: int, room: int, past: int) -> ForwardError:
        return ForwardError(
            Problem(
                LayerFault.CACHE_TOO_SMALL,
                "the tokens do not fit the cache",
                expected=f"at most {room} more tokens" if past else f"at most {room} more tokens, in an empty slot",
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
