"""Tensors from rank to rank as bytes.

Every payload crosses as ``uint8``: no dtype that a back end does not know (gloo and NCCL refuse ``float8_e8m0fnu``), and
no pickle.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist

from rtp_llm.errors import ParallelError, internal
from rtp_llm.parallel.faults import ParallelFault

T = TypeVar("T")

#: Seconds between two looks for another rank's error while a message is under way.
POLL_SECONDS = 0.05
#: Looks for the end of a collective without a pause, and the pause between later ones: a message takes a fraction of a
#: millisecond between GPUs, and some milliseconds between processes of a CPU, which want the core for themselves.
_EAGER_LOOKS, _PAUSE_SECONDS = 100, 0.0002


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, flat, sharing its storage; whatever its dtype, scalars and empties included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def send_bytes(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Sends a tensor's bytes to group rank ``to``; met by :func:`receive_bytes` of the same size there.

    ``check`` is called while waiting, and raises what ends the wait.
    """
    payload = as_bytes(tensor.cpu())
    _wait(dist.isend(payload, group=group, group_dst=to), check)


def receive_bytes(into: torch.Tensor, source: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Fills the contiguous CPU tensor ``into`` with the bytes that group rank ``source`` sends."""
    if not into.is_contiguous() or into.device.type != "cpu":
        raise ParallelError(
            internal(ParallelFault.INTERNAL, "bytes would be received into a copy", expected="contiguous memory of the host")
        )
    _wait(dist.irecv(into.reshape(-1).view(torch.uint8), group=group, group_src=source), check)


def broadcast_bytes(flat: torch.Tensor, source: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Fills ``flat`` (``uint8``, contiguous, on any device) on all ranks with what it holds on group rank ``source``.

    When it returns, the bytes are there, and ``flat`` may be changed or freed.
    """
    _together([flat], lambda: dist.broadcast(flat, group=group, group_src=source, async_op=True), check)


def scatter_bytes(
    flat: torch.Tensor, parts: Sequence[torch.Tensor], source: int, group: dist.ProcessGroup, check: Callable[[], None]
) -> None:
    """Fills ``flat`` on each rank with its part of ``parts``, one of equal size for each rank, which only group rank ``source`` has;
    as :func:`broadcast_bytes` otherwise."""
    _together([flat, *parts], lambda: dist.scatter(flat, list(parts) or None, group=group, group_src=source, async_op=True), check)


def all_gather_bytes(parts: Sequence[torch.Tensor], flat: torch.Tensor, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Fills ``parts``, one of equal size for each rank, on all ranks with their ``flat``; as :func:`broadcast_bytes` otherwise."""
    _together([flat, *parts], lambda: dist.all_gather(list(parts), flat, group=group, async_op=True), check)


def _together(tensors: Sequence[torch.Tensor], start: Callable[[], dist.Work | None], check: Callable[[], None]) -> None:
    """Begins a collective and waits for its end; nothing is sent where there is nothing to send."""
    first = tensors[0]
    if not all(t.dtype is torch.uint8 and t.is_contiguous() and t.shape == first.shape for t in tensors):
        raise ParallelError(internal(ParallelFault.INTERNAL, "a collective is given other things than equal parts of contiguous bytes"))
    if not first.numel():
        return
    stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
    work = start()
    assert work is not None, "this rank is not in the group"
    # Asked for, and not waited for: a wait could not be left when a peer has failed.
    looks = 0
    while not work.is_completed():
        check()
        looks += 1
        time.sleep(0 if looks < _EAGER_LOOKS else _PAUSE_SECONDS)
    work.wait()
    if stream is not None:
        stream.synchronize()


def _wait(work: dist.Work | None, check: Callable[[], None]) -> None:
    """Waits for a message: gloo finishes one only inside ``wait``."""
    assert work is not None, "this rank is not in the group"
    waited_for(work.wait, check)


def waited_for(call: Callable[[], T], check: Callable[[], None]) -> T:
    """What ``call`` returns or raises, while ``check`` may end the wait.

    In a thread of its own, for what cannot be interrupted: a peer that has failed would hold this rank until the group's time-out.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        # Whatever it is belongs to the thread that waits, which would wait for ever without it.
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    waiter = threading.Thread(target=run, name="rtp_llm-wire", daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(POLL_SECONDS)
        check()
    return done.result()
