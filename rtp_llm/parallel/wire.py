"""Collectives that move bytes, between ranks that poll for each other's failures while they wait.

Every payload crosses as ``uint8`` on the CPU: no dtype that a back end does not know (``float8_e8m0fnu`` on NCCL and
gloo), and no pickle.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

#: Seconds between two looks at a collective that has not finished: short beside any load, long beside a look.
POLL_SECONDS = 0.005


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, flat, sharing its storage; whatever its dtype, scalars and empties included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def wait(work: dist.Work, check: Callable[[], None]) -> None:
    """Waits for a collective, calling ``check`` in between; ``check`` raises what ends the waiting.

    Raises:
        RuntimeError: of torch, where the collective itself failed.
    """
    while not work.is_completed():
        check()
        time.sleep(POLL_SECONDS)
    work.wait()


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup, check: Callable[[], None]) -> list[bytes]:
    """Every rank's ``payload``, in rank order; lengths may differ."""
    ranks = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    wait(dist.all_gather(lengths, torch.tensor([len(payload)]), group=group, async_op=True), check)
    most = max(int(n) for n in lengths)
    mine = torch.zeros(most, dtype=torch.uint8)
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    parts = [torch.empty(most, dtype=torch.uint8) for _ in range(ranks)]
    if most:
        wait(dist.all_gather(parts, mine, group=group, async_op=True), check)
    return [part[: int(n)].numpy().tobytes() for part, n in zip(parts, lengths, strict=True)]


def send_bytes(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Sends a tensor's bytes to group rank ``to``; met by :func:`receive_bytes` of the same size there."""
    work = dist.isend(as_bytes(tensor.cpu()), group=group, group_dst=to)
    assert work is not None
    wait(work, check)


def receive_bytes(like: torch.Tensor, source: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Fills the contiguous CPU tensor ``like`` with the bytes that group rank ``source`` sends."""
    assert like.is_contiguous() and like.device.type == "cpu"
    work = dist.irecv(like.reshape(-1).view(torch.uint8), group=group, group_src=source)
    assert work is not None
    wait(work, check)
