"""Shard arithmetic: every element has an owner, replicas are where the rule puts them, bad sizes are refused with good ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.errors import PlanError
from rtp_llm.parallel.shard import VOCAB_MULTIPLE, Divisibility, check_divisible, even, kv_heads, padded_vocab, valid_sizes, vocab


@given(st.integers(1, 64), st.integers(1, 64))
def test_kv_heads_cover_every_head(heads: int, ranks: int) -> None:
    """Each rank holds an equal number of neighbouring heads; with more ranks than heads each head has equally many ranks."""
    if not Divisibility("KV heads", heads, replicated=True).holds(ranks):
        return
    spans = [kv_heads(heads, ranks, rank) for rank in range(ranks)]
    held = [head for a, b in spans for head in range(a, b)]
    assert held == sorted(held) and {held.count(h) for h in range(heads)} == {max(1, ranks // heads)}


@given(st.integers(1, 1000), st.integers(1, 16))
def test_vocabulary_is_padded_alike_on_every_rank(size: int, ranks: int) -> None:
    """Real rows follow each other without gap, every rank has the same number of rows, padding is at the end."""
    real, rows = [], set()
    for rank in range(ranks):
        (a, b), padding = vocab(size, ranks, rank)
        real += range(a, b)
        rows.add(b - a + padding)
    assert real == list(range(size)) and rows == {padded_vocab(size, ranks) // ranks}
    assert ranks == 1 or next(iter(rows)) % VOCAB_MULTIPLE == 0


def test_even() -> None:
    """Contiguous, equal, in rank order: Megatron's split."""
    assert [even(12, 3, r) for r in range(3)] == [(0, 4), (4, 8), (8, 12)]


def test_refusal_lists_every_broken_size_and_the_ones_that_work() -> None:
    """9 heads and 3 KV heads over 2 ranks: both are named, with the sizes that fit all conditions."""
    conditions = (Divisibility("attention heads", 9), Divisibility("KV heads", 3, replicated=True), Divisibility("rows of the MLP", 1536))
    assert valid_sizes(conditions) == [1, 3]
    check_divisible(conditions, 3)
    with pytest.raises(PlanError) as caught:
        check_divisible(conditions, 2)
    assert len(caught.value.problems) == 2
    assert all("[1, 3]" in (p.expected or "") for p in caught.value.problems)
