"""Shard arithmetic: which part of a size belongs to which rank.  Pure functions on integers.

The splits are Megatron's (Shoeybi et al., 2019, arXiv:1909.08053): contiguous, equal, in rank order.  KV heads are
replicated where there are more ranks than heads; a vocabulary is padded to a multiple that every rank can share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rtp_llm.errors import PlanError, Problem, internal
from rtp_llm.parallel.faults import ParallelFault

#: Vocabulary rows are padded to a multiple of this for each rank: GEMM kernels want 64-row tiles, and Megatron's and
#: vLLM's default is the same.
VOCAB_MULTIPLE = 64

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Divisibility:
    """The number of tensor-parallel ranks must divide ``size`` (of ``what``, e.g. "attention heads").

    ``replicated`` (KV heads): it may also be a multiple of ``size``."""

    what: str
    size: int
    replicated: bool = False

    def holds(self, ranks: int) -> bool:
        return self.size % ranks == 0 or (self.replicated and ranks % self.size == 0)


def valid_sizes(conditions: Iterable[Divisibility], most: int = 64) -> list[int]:
    """The numbers of ranks up to ``most`` that fulfil all conditions."""
    wanted = tuple(conditions)
    return [n for n in range(1, most + 1) if all(c.holds(n) for c in wanted)]


def check_divisible(conditions: Iterable[Divisibility], ranks: int) -> None:
    """Refuses a number of ranks that breaks a condition: all broken ones at once, with the numbers that work.

    Raises:
        PlanError: with one ``INDIVISIBLE`` problem for each broken condition.
    """
    wanted = tuple(conditions)
    sizes = valid_sizes(wanted)
    broken = [
        Problem(
            ParallelFault.INDIVISIBLE,
            f"{c.size} {c.what} cannot be divided over {ranks} tensor-parallel ranks",
            expected=f"tp_size one of {sizes}",
            actual=str(ranks),
        )
        for c in wanted
        if not c.holds(ranks)
    ]
    if broken:
        raise PlanError(broken)


def even(size: int, ranks: int, rank: int) -> Span:
    """``rank``'s contiguous part of ``size``; the caller has made sure that it divides."""
    if size % ranks or not 0 <= rank < ranks:
        raise PlanError(
            internal(
                ParallelFault.INTERNAL,
                "a layer divides a size that no condition of its family names",
                actual=f"{size} over {ranks}, rank {rank}",
            )
        )
    part = size // ranks
    return part * rank, part * (rank + 1)


def kv_heads(heads: int, ranks: int, rank: int) -> Span:
    """The KV heads of ``rank``: its share, or, with more ranks than heads, the one head that it shares."""
    if ranks <= heads:
        return even(heads, ranks, rank)
    if ranks % heads:
        raise PlanError(
            internal(ParallelFault.INTERNAL, "a layer shares heads that no condition of its family names", actual=f"{heads} over {ranks}")
        )
    head = rank // (ranks // heads)
    return head, head + 1


def padded_vocab(size: int, ranks: int) -> int:
    """``size`` rounded up so that each rank holds the same multiple of :data:`VOCAB_MULTIPLE` rows; a single rank is
    not padded."""
    if ranks == 1:
        return size
    unit = VOCAB_MULTIPLE * ranks
    return -(-size // unit) * unit


def vocab(size: int, ranks: int, rank: int) -> tuple[Span, int]:
    """The real rows of the vocabulary that ``rank`` holds (perhaps none), and the number of padding rows after them."""
    start, stop = even(padded_vocab(size, ranks), ranks, rank)
    real = (min(start, size), min(stop, size))
    return real, (stop - start) - (real[1] - real[0])
