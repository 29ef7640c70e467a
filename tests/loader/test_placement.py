"""What is asked of torch's allocator for the parameters of a GPU."""

from __future__ import annotations

import pytest

from rtp_llm.loader.fill.placement import reserved_bytes
from rtp_llm.plan.pieces import ParamSpec

MIB = 1 << 20


@pytest.mark.parametrize(
    ("shapes", "nbytes"),
    [
        ((), 0),
        (((512, 1024), (4096,)), 0),
        (((1024, 1024), (4096,)), 2 * MIB),
        (((1024, 1025),) * 3, 3 * (2 * MIB + 2048)),
        (((1001, 1001), (999, 999)), 2_004_480 + 1_996_288),
    ],
)
def test_memory_is_reserved_for_what_is_cut_out_of_it(shapes: tuple[tuple[int, ...], ...], nbytes: int) -> None:
    """Each parameter in the 512 bytes that the allocator rounds to, and none of up to 1 MiB, which come from elsewhere."""
    assert reserved_bytes([ParamSpec(str(number), shape, "bfloat16", ()) for number, shape in enumerate(shapes)]) == nbytes
