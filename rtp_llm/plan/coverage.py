"""Whether boxes fill a tensor exactly: no gap, no overlap.  Proved by regions, not by counting."""

from __future__ import annotations

from collections.abc import Sequence

from rtp_llm.plan.boxes import Box, Shape, inside, volume, whole


def tiles(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Whether ``boxes`` cover every element of a tensor of ``shape`` once.

    Cuts the first dimension into slabs at every box's edge; the boxes that cross a slab must tile its remaining dimensions.
    Empty boxes are ignored.
    """
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return True
    solid: list[Box] = []
    for box in boxes:
        if not inside(box, shape):
            return False
        if volume(box):
            solid.append(box)
    return _tiles(shape, solid)


def _tiles(shape: Shape, boxes: list[Box]) -> bool:
    if len(boxes) == 1:  # most slabs: experts, each of which is one matrix or two
        return boxes[0] == whole(shape)
    if not shape:
        return False
    if 0 in shape:
        return not boxes
    cuts = sorted({0, shape[0], *(cut for box in boxes for cut in box[0])})
    index = {cut: i for i, cut in enumerate(cuts)}
    slabs: list[list[Box]] = [[] for _ in cuts[1:]]
    for box in boxes:
        for i in range(index[box[0][0]], index[box[0][1]]):
            slabs[i].append(box[1:])
    return all(_tiles(shape[1:], slab) for slab in slabs)
