"""Coverage by regions, byte runs of boxes, and boxes in parts: held against numpy on random shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.plan.boxes import volume, whole
from rtp_llm.plan.coverage import tiles
from rtp_llm.plan.ranges import Runs, byte_runs, parts

shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def boxed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    shape = draw(shapes)
    box = []
    for n in shape:
        a = draw(st.integers(0, n))
        box.append((a, draw(st.integers(a, n))))
    return shape, tuple(box)


def region(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in box)


@given(boxed(), st.sampled_from([8, 16, 32, 64]))
def test_byte_runs_are_the_box_in_row_major_order(case: tuple, bits: int) -> None:
    """Reading the runs one after another gives exactly the bytes of the box, in the order of its elements."""
    shape, box = case
    size = bits // 8
    data = np.arange(int(np.prod(shape)) * size, dtype=np.uint32).reshape(*shape, size)
    runs = byte_runs(shape, box, bits)
    flat = data.reshape(-1)
    got = [x for offset in runs.offsets() for x in flat[offset : offset + runs.length]]
    assert got == data[region(box)].reshape(-1).tolist()
    assert runs.nbytes == volume(box) * size
    assert not got or runs.stop == max(runs.offsets()) + runs.length


def test_byte_runs_are_as_few_as_they_can_be() -> None:
    """Rows of a matrix are one run; columns are one run a row: a plan never makes more reads than the layout needs."""
    assert byte_runs((8, 6), ((2, 5), (0, 6)), 16) == Runs(24, 36)
    assert byte_runs((8, 6), ((0, 8), (2, 4)), 16) == Runs(4, 4, ((8, 12),))
    assert byte_runs((3, 8, 6), ((1, 2), (0, 8), (0, 6)), 8) == Runs(48, 48)
    assert byte_runs((), (), 32) == byte_runs((1,), ((0, 1),), 32)


def test_half_bytes_are_refused() -> None:
    """A box of 4-bit elements that begins in the middle of a byte has no byte range."""
    assert byte_runs((4, 8), ((1, 3), (0, 8)), 4).nbytes == 8
    with pytest.raises(ValueError, match="do not end on a byte"):
        byte_runs((4, 8), ((0, 4), (1, 4)), 4)


@given(boxed(), st.integers(1, 40))
def test_parts_tile_the_box_in_order(case: tuple, most: int) -> None:
    """Parts are small enough, cover the box once, and follow each other in row-major order."""
    shape, box = case
    marks = np.zeros(shape, dtype=int)
    order = np.arange(int(np.prod(shape))).reshape(shape)
    seen: list[int] = []
    for part in parts(box, most):
        assert volume(part) <= most
        marks[region(part)] += 1
        seen += order[region(part)].reshape(-1).tolist()
    expected = np.zeros(shape, dtype=int)
    expected[region(box)] = 1
    assert (marks == expected).all()
    assert seen == sorted(seen)


@given(shapes, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=4), st.data())
def test_tiles_agrees_with_counting_every_element(shape: tuple[int, ...], cuts: list[tuple[int, int]], data: st.DataObject) -> None:
    """A tensor cut at random is tiled; with one box dropped, doubled or moved it is tiled only if counting says so."""
    boxes = [whole(shape)]
    for dimension, at in cuts:
        if dimension < len(shape):
            boxes = [
                piece
                for box in boxes
                for a, b in [box[dimension]]
                for span in ([(a, min(max(at, a), b)), (min(max(at, a), b), b)])
                for piece in [(*box[:dimension], span, *box[dimension + 1 :])]
            ]
    assert tiles(shape, boxes)
    change = data.draw(st.sampled_from(["drop", "double", "shift"]))
    victim = data.draw(st.integers(0, len(boxes) - 1))
    if change == "drop":
        boxes.pop(victim)
    elif change == "double":
        boxes.append(boxes[victim])
    else:
        boxes[victim] = tuple((a + 1, b + 1) for a, b in boxes[victim])
    counts = np.zeros(shape, dtype=int)
    fits = True
    for box in boxes:
        fits &= all(b <= n for (_, b), n in zip(box, shape, strict=True))
        counts[region(box)] += 1
    assert tiles(shape, boxes) == (fits and bool((counts == 1).all()))
