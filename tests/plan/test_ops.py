"""How boxes pass through ops: what is read for a part equals that part of what the whole would give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.plan.boxes import Box, view, whole
from rtp_llm.plan.ops import Cut, Deinterleave, Op, Select, Source, Transpose

#: Raw shape and ops, alone and in chains.
CHAINS: list[tuple[tuple[int, ...], tuple[Op, ...]]] = [
    ((6, 4), ()),
    ((3, 6, 4), (Select(1),)),
    ((6, 4), (Cut(2, 3),)),
    ((6, 8), (Cut(3, 4, 1), Transpose())),
    ((6, 4), (Transpose(),)),
    ((8, 4), (Deinterleave(2),)),
    ((3, 6, 4), (Select(2), Transpose(), Cut(2, 2))),
    ((3, 8, 4), (Select(0), Deinterleave(2), Cut(4, 4), Transpose())),
]


def boxes_of(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    spans = [st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted).map(tuple) for n in shape]
    return st.tuples(*spans)


@pytest.mark.parametrize(("shape", "ops"), CHAINS)
@given(data=st.data())
def test_a_part_read_alone_is_that_part_of_the_whole(shape: tuple[int, ...], ops: tuple[Op, ...], data: st.DataObject) -> None:
    """``apply(raw[pull(box)])`` is ``(whole slot)[box]`` for every box: a shard cut before an op is the shard cut after it."""
    raw = torch.arange(torch.Size(shape).numel()).reshape(shape)
    source = Source("raw", shape, ops)
    slot = raw
    for op in ops:
        piece = view(slot, op.pull(whole(op.out_shape(tuple(slot.shape))), tuple(slot.shape)))
        slot = op.apply(piece)
    assert tuple(slot.shape) == source.slot_shape
    box = data.draw(boxes_of(source.slot_shape))
    assert torch.equal(source.apply(view(raw, source.pull(box)), box), view(slot, box))


@pytest.mark.parametrize(("shape", "ops"), CHAINS)
def test_reverse_gives_the_raw_bytes_back(shape: tuple[int, ...], ops: tuple[Op, ...]) -> None:
    """Export writes what was read: the reverse of a whole slot is the part of the raw tensor it came from."""
    raw = torch.randn(shape)
    source = Source("raw", shape, ops)
    box = whole(source.slot_shape)
    read = view(raw, source.pull(box))
    if source.passes(box):
        assert torch.equal(source.reverse(source.apply(read, box)), read)


def test_an_op_that_cannot_pass_a_box_says_so() -> None:
    """A permutation over a head pulls the whole tensor for one row, and the plan counts that."""
    source = Source("raw", (8, 4), (Deinterleave(2),))
    assert not source.passes(((0, 1), (0, 4)))
    assert source.pull(((0, 1), (0, 4))) == ((0, 8), (0, 4))
    assert Source("raw", (8, 4), (Transpose(),)).passes(((0, 1), (2, 5)))


def test_deinterleave_is_transformers_permutation() -> None:
    """Rows (0, 1, 2, 3) of a head, pairs side by side, become halves (0, 2, 1, 3), as transformers' Llama conversion does."""
    rows = torch.arange(8)[:, None]
    expected = rows.view(2, 2, 2, 1).transpose(1, 2).reshape(8, 1)  # w.view(heads, d // 2, 2, cols).transpose(1, 2)
    assert torch.equal(Deinterleave(2).apply(rows), expected)
    assert expected[:4, 0].tolist() == [0, 2, 1, 3]
