"""Bytes from rank to rank by every collective, between real processes: any dtype, any size, and a way out when a peer fails."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from contextlib import suppress

import pytest
import torch

from rtp_llm.parallel.wire import all_gather_bytes, as_bytes, broadcast_bytes, receive_bytes, scatter_bytes, send_bytes, waited_for
from rtp_llm.parallel.world import host_group, join_world, meeting
from tests.support.ranks import run_ranks

#: Types that gloo or NCCL refuse among them; odd sizes, a scalar, and nothing at all.
DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bfloat16", "float32", "int64", "bool", "uint8")
SHAPES = ((), (1,), (0,), (3, 0), (33,), (7, 11, 3), (1 << 16,))


def random_bits(dtype: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Every bit pattern, NaN included; whatever rank asks gets the same."""
    empty = torch.empty(shape, dtype=getattr(torch, dtype))
    bits = torch.randint(
        0, 2 if dtype == "bool" else 256, (empty.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return bits.view(empty.dtype).reshape(shape) if empty.nbytes else empty


def collectives() -> int:
    """Each of them for every dtype and shape, from each rank; returns how many transfers were compared."""
    world = join_world(os.environ, "cpu", 60.0)
    compared = 0
    with world.watch() as watch, host_group(world, watch) as group, meeting(world, watch) as check:
        for dtype in DTYPES:
            for shape in SHAPES:
                every = [as_bytes(random_bits(dtype, shape, rank)) for rank in range(world.size)]
                mine = every[world.rank]
                for source in range(world.size):
                    flat = mine.clone()
                    broadcast_bytes(flat, source, group, check)
                    assert torch.equal(flat, every[source]), ("broadcast", dtype, shape, source)
                    flat = torch.full_like(mine, 7)
                    scatter_bytes(flat, every if world.rank == source else (), source, group, check)
                    assert torch.equal(flat, mine), ("scatter", dtype, shape, source)
                    compared += 2
                gathered = [torch.full_like(mine, 7) for _ in every]
                all_gather_bytes(gathered, mine, group, check)
                assert all(torch.equal(a, b) for a, b in zip(gathered, every, strict=True)), ("all-gather", dtype, shape)
                received = random_bits(dtype, shape, 99)
                if world.rank == 0:
                    send_bytes(random_bits(dtype, shape, 5), world.size - 1, group, check)
                elif world.rank == world.size - 1:
                    receive_bytes(received, 0, group, check)
                    assert torch.equal(as_bytes(received), as_bytes(random_bits(dtype, shape, 5))), ("send", dtype, shape)
                compared += 2
    return compared


@pytest.mark.parametrize("world", [2, 3])
def test_every_bit_arrives(world: int) -> None:
    """Broadcast, scatter, all-gather, send and receive."""
    for result in run_ranks(world, collectives, timeout=120):
        assert result.value == len(DTYPES) * len(SHAPES) * (2 * world + 2)


def test_any_error_of_what_is_waited_for() -> None:
    """It ends the wait, and is told, whatever it is: torch raises more than RuntimeError."""
    told: Future[int] = Future()

    def refused() -> int:
        raise ValueError("no such back end")

    def wait() -> None:
        try:
            told.set_result(waited_for(refused, lambda: None))
        except ValueError as error:
            told.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    with pytest.raises(ValueError, match="no such back end"):
        told.result(timeout=30)


class GivenUp(Exception):
    """What ends a wait."""


def waits_for_nobody(kind: str) -> int:
    """Rank 1 never takes part, or not as it should; rank 0's ``check`` finds that out at its tenth call.  Returns how often it was
    called: the group's time-out is beyond the test's."""
    world = join_world(os.environ, "cpu", 600.0)
    flat = torch.zeros(1 << 20, dtype=torch.uint8)
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls >= 10:
            raise GivenUp

    with world.watch() as watch:
        with suppress(GivenUp), host_group(world, watch) as group:
            if kind == "crossed":
                broadcast_bytes(flat, 1 - world.rank, group, check)
            elif world.rank == 1:
                raise GivenUp
            elif kind == "broadcast":
                broadcast_bytes(flat, 1, group, check)
            elif kind == "scatter":
                scatter_bytes(flat, (), 1, group, check)
            else:
                all_gather_bytes([flat.clone(), flat.clone()], flat, group, check)
        watch.exchange(b"out")
    return calls


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "all-gather", "crossed"])
def test_a_wait_can_be_left(kind: str) -> None:
    """What ``check`` raises ends a collective that a peer will never join, and the group, long before the group's time-out; also
    where each waits for the other, and letting go of the group would wait for both."""
    first, _ = run_ranks(2, waits_for_nobody, kind, timeout=120)
    assert first.value >= 10
