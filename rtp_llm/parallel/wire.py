"""Tensors from rank to rank as bytes.

Every payload is sent as ``uint8``: back ends need to know no dtype (gloo and NCCL refuse ``float8_e8m0fnu``), and nothing is
pickled.
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

#: Seconds between two checks for another rank's error while a message is under way.
POLL_SECONDS = 0.05
#: Polls for the end of a collective without a pause, and the pause between later polls.  A message takes a fraction of a
#: millisecond between GPUs, and some milliseconds between processes on a CPU, which need the core.
_EAGER_LOOKS, _PAUSE_SECONDS = 100, 0.0002


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, flat, sharing its storage; any dtype, scalars and empty tensors included."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def send_bytes(tensor: torch.Tensor, to: int, group: dist.ProcessGroup, check: Callable[[], None]) -> None:
    """Sends a tensor's bytes to group rank ``to``, which calls :func:`receive_bytes` for the same size.

    ``check`` is called while waiting; what it raises ends the wait.
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
    """Fills ``flat`` (``uint8``, contiguous, any device) on all ranks with its content on group rank ``source``.

    The bytes are there on return, and ``flat`` may be changed or freed.
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
    """Starts a collective and waits for its end; empty tensors are not sent."""
    first = tensors[0]
    if not all(t.dtype is torch.uint8 and t.is_contiguous() and t.shape == first.shape for t in tensors):
        raise ParallelError(internal(ParallelFault.INTERNAL, "a collective is given other things than equal parts of contiguous bytes"))
    if not first.numel():
        return
    stream = torch.cuda.current_stream(first.device) if first.is_cuda else None
    work = start()
    assert work is not None, "this rank is not in the group"
    # Polled: a wait could not be left when a peer has failed.
    looks = 0
    while not work.is_completed():
        check()
        looks += 1
        time.sleep(0 if looks < _EAGER_LOOKS else _PAUSE_SECONDS)
    work.wait()
    if stream is not None:
        stream.synchronize()


def _wait(work: dist.Work | None, check: Callable[[], None]) -> None:
    """Waits for a message; gloo completes one only inside ``wait``."""
    assert work is not None, "this rank is not in the group"
    waited_for(work.wait, check)


def waited_for(call: Callable[[], T], check: Callable[[], None]) -> T:
    """Returns or raises what ``call`` does, unless ``check`` ends the wait.

    ``call`` runs in a thread, since it cannot be interrupted: a failed peer would hold this rank until the group's time-out.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(call())
        # Every error belongs to the waiting thread, which would wait for ever without it.
        except BaseException as error:  # noqa: BLE001
            done.set_exception(error)

    waiter = threading.Thread(target=run, name="rtp_llm-wire", daemon=True)
    waiter.start()
    while waiter.is_alive():
        waiter.join(POLL_SECONDS)
        check()
    return done.result()
