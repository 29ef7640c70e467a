"""The paged cache's books: pages and cache rows are handed out, counted when a pass is done, and given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_llm.kernels.paging import PAGE_SIZE, SAFE_PAGE, PagedRows
from rtp_llm.layers.cache import CacheShape, CacheSize, PagedCache
from rtp_llm.layers.faults import ForwardError

F32 = torch.float32
CPU = torch.device("cpu")
KEYS = CacheShape(((2, 4), (2, 4)))
LATENTS = CacheShape(((6,), (2,), (3,)))
STATES = CacheShape(states=(((6, 3), None), ((2, 4, 4), F32)))


def cache(cache_rows: int = 3, pages: int = 8, max_length: int = 64, layers: tuple[CacheShape, ...] = (KEYS, LATENTS)) -> PagedCache:
    return PagedCache(layers, CacheSize(cache_rows, pages, max_length), dtype=F32, device="cpu")


def add(made: PagedCache, cache_rows: list[int], tokens: int) -> None:
    """A pass of which nothing is computed."""
    made.advance(made.begin(len(cache_rows), tokens, cache_rows))


def test_bytes_are_those_of_the_tensors() -> None:
    """What a size says that a cache will take is what it takes, the safe page and the spare states included."""
    layers = (KEYS, LATENTS, STATES)
    made = cache(layers=layers)
    page = PAGE_SIZE * 4
    assert made.nbytes == 9 * page * (16 + 11) + 4 * (18 + 32) * 4 == made.size.nbytes(layers, F32)
    half = PagedCache(layers, made.size, dtype=torch.bfloat16, device="cpu")
    assert half.nbytes == 9 * page // 2 * 27 + 4 * (18 * 2 + 32 * 4) == half.size.nbytes(layers, torch.bfloat16)


def test_a_pass_counts_when_it_is_done() -> None:
    """Lengths and free pages move with ``advance``; one that never comes changes nothing, and what was written is written over."""
    made = cache()
    first, second = made.take(), made.take()
    add(made, [first], 20)
    before = made.free_pages, made.lengths([first, second])
    rows = PagedRows.of(made.begin(2, 13, [first, second]), CPU)
    made.write(0, rows, torch.ones(26, 2, 4), torch.ones(26, 2, 4))
    made.keep(0, torch.ones(1))
    assert (made.free_pages, made.lengths([first, second])) == before == (6, [20, 0])
    host = made.begin(1, 13, [second])
    made.advance(host)
    assert made.free_pages == 5 and made.lengths([first, second]) == [20, 13]
    with pytest.raises(ForwardError, match="INTERNAL.*not begun"):
        made.advance(host)
    made.release(first)
    with pytest.raises(ForwardError, match="INTERNAL.*no sequence has taken"):
        made.release(first)  # its pages would be free twice, and two sequences would write into them


def test_tokens_lie_where_the_tables_say() -> None:
    """The token at position ``p`` of a sequence lies at ``p % PAGE_SIZE`` of page ``p // PAGE_SIZE`` of its table."""
    made = cache()
    cache_rows = [made.take(), made.take()]
    add(made, cache_rows[1:], 15)
    host = made.begin(2, 3, cache_rows)
    rows = PagedRows.of(host, CPU)
    values = torch.arange(6.0)[:, None, None].expand(6, 2, 4)
    pages, _ = made.write(0, rows, values, values)
    assert rows.positions.tolist() == [[0, 1, 2], [15, 16, 17]] and rows.lengths.tolist() == [3, 18] and rows.keys == 18
    for row, (tokens, past) in enumerate(((3, 0), (3, 15))):
        for t in range(tokens):
            page = host.tables[row, (past + t) // PAGE_SIZE]
            assert page != SAFE_PAGE
            assert pages[page, (past + t) % PAGE_SIZE, 0, 0] == row * 3 + t
    assert not pages[SAFE_PAGE].any()


@pytest.mark.parametrize(
    ("cache_rows", "tokens", "word"),
    [
        ([0], 65, "at most 64 more"),
        ([0, 1], 40, "NO_PAGES.*3 free pages.*2 of 6"),
        ([0, 0], 1, "each once"),
        ([2], 1, "rows of no sequence"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_begins(cache_rows: list[int], tokens: int, word: str) -> None:
    """More tokens than a sequence may have, than there are pages for, and cache rows that are none: the cache is as it was."""
    made = cache(pages=6)
    made.take()
    made.take(64)
    with pytest.raises(ForwardError, match=word):
        made.begin(len(cache_rows), tokens, cache_rows)
    add(made, [0, 1], 10)
    assert made.lengths([0, 1]) == [10, 10] and made.free_pages == 1


def test_cache_rows_and_promised_pages() -> None:
    """A sequence that asked for its pages has them whatever others do; a cache row more than there are, and pages more, are refused."""
    made = cache(cache_rows=2, pages=4)
    one = made.take(40)
    assert made.free_pages == 1
    with pytest.raises(ForwardError, match="NO_PAGES"):
        made.take(17)
    two = made.take(16)
    with pytest.raises(ForwardError, match="NO_CACHE_ROW"):
        made.take()
    with pytest.raises(ForwardError, match="NO_PAGES"):
        made.begin(1, 17, [two])
    add(made, [one], 40)
    made.release(one)
    assert (made.free_pages, made.free_rows) == (3, 1)
    with pytest.raises(ForwardError, match="at most 64"):
        made.take(65)


def test_states_count_when_they_are_settled_and_begin_at_zero() -> None:
    """What a layer keeps is taken on at the end, for its own rows alone; whoever takes a cache row next starts from nothing."""
    made = cache(layers=(STATES,))
    cache_rows = [made.take(), made.take()]
    rows = PagedRows.of(made.begin(1, 2, cache_rows[1:]), CPU)
    made.keep(0, torch.ones(1, 6, 3), torch.ones(1, 2, 4, 4))
    assert not any(state.any() for state in made.states[0])
    made.settle(rows)
    made.advance(rows.host)
    assert [state[1].all().item() and not state[0].any().item() for state in made.states[0]] == [True, True]
    # A pass that failed had put something aside.
    made.begin(1, 1, cache_rows[:1])
    made.keep(0, torch.ones(1, 6, 3), torch.ones(1, 2, 4, 4))
    rows = PagedRows.of(made.begin(1, 1, cache_rows[:1]), CPU)
    made.settle(rows)
    assert not any(state[0].any() for state in made.states[0])
    made.release(cache_rows[1])
    assert made.take() == cache_rows[1] and not any(state.any() for state in made.states[0])


def test_a_cache_may_be_made_in_inference_mode() -> None:
    """And used outside of it, as one that was made outside may be used inside."""
    with torch.inference_mode():
        made = cache(layers=(KEYS, STATES))
    for inside in (False, True):
        with torch.inference_mode(inside):
            rows = PagedRows.of(made.begin(1, 2, [made.take(20)]), CPU)
            made.write(0, rows, torch.ones(2, 2, 4), torch.ones(2, 2, 4))
            made.keep(1, torch.ones(1, 6, 3), torch.ones(1, 2, 4, 4))
            made.settle(rows)
            made.advance(rows.host)


def test_reset_forgets_tokens_and_keeps_slots() -> None:
    """The cache is again as ``new_cache`` made it."""
    made = cache()
    cache_rows = [made.take(), made.take()]
    add(made, cache_rows, 30)
    assert made.length == 30
    made.reset()
    assert made.length == 0 and made.free_pages == 8 and made.free_rows == 1
    add(made, cache_rows, 5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "add", "fail"]), st.integers(0, 3), st.integers(1, 40)), max_size=40))
def test_no_page_is_lost_or_shared(steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens, each page is free or belongs to one sequence, which has as many as its tokens need."""
    made = cache(cache_rows=4, pages=10, max_length=100)
    alive: dict[int, int] = {}
    for action, which, tokens in steps:
        cache_row = which if which in alive else None
        try:
            if action == "take":
                alive[made.take()] = 0
            elif action == "release" and cache_row is not None:
                made.release(cache_row)
                del alive[cache_row]
            elif cache_row is not None:
                host = made.begin(1, tokens, [cache_row])
                if action == "add":
                    made.advance(host)
                    alive[cache_row] += tokens
        except ForwardError:
            pass
        assert made.lengths(list(alive)) == list(alive.values())
        assert made.free_pages == 10 - sum(-(-length // PAGE_SIZE) for length in alive.values())
        owned = [page for one, length in alive.items() if length for page in pages_of(made, one, length)]
        assert len(set(owned)) == len(owned) and SAFE_PAGE not in owned


def pages_of(made: PagedCache, cache_row: int, length: int) -> list[int]:
    """The pages of a sequence, as a pass of one more token sees them, where there is room for one."""
    try:
        tables = made.begin(1, 1, [cache_row]).tables
    except ForwardError:
        return []
    pages: list[int] = tables[0, : -(-length // PAGE_SIZE)].tolist()
    return pages
