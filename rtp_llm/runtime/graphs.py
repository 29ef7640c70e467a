"""Decoding by CUDA graphs: a pass is recorded once for each batch size, and replayed with new contents in the same tensors.

A decode step of a small batch is thousands of short kernels, and launching them takes longer than they run.  A replay is one
launch.  Nothing in it may depend on the host.  Ids, positions, tables, lengths, rotary tables and attention's plans are in
tensors that are all written before each replay, padding rows included.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rtp_llm.kernels.paging import HostRows, PagedRows
from rtp_llm.layers.attention import Step
from rtp_llm.layers.cache import PagedCache
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.runtime.generation import Decoder, EagerDecoder

_log = logging.getLogger("rtp_llm.runtime")

Work = Callable[[], torch.Tensor]

#: Runs before a recording, as torch.cuda.graph advises: libraries initialise in the first ones, which cannot be recorded.
_WARM_UPS = 3


class Capture(Protocol):
    """Records work."""

    def __call__(self, work: Work) -> Work:
        """Runs ``work`` at least once.  The result runs it again on the same tensors, and returns the same tensor."""


def call_again(work: Work) -> Work:
    """Records nothing and calls the work each time, for devices without graphs."""
    work()
    return work


class CudaCapture:
    """Records CUDA graphs, which share one memory pool because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all, since libraries keep memory for each stream, such as cuBLAS's 32 MiB of workspace.
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, work: Work) -> Work:
        current, graph = torch.cuda.current_stream(self._device), torch.cuda.CUDAGraph()
        self._side.wait_stream(current)
        # Around the recording too: if it fails, torch.cuda.graph leaves its own stream as the current one.
        with torch.cuda.stream(self._side):
            for _ in range(_WARM_UPS):
                work()
            # thread_local: other threads, such as NCCL's, may still query their events.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side, capture_error_mode="thread_local"):
                result = work()
        current.wait_stream(self._side)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


class _Fixed:
    """The tensors of one batch size, and the recording on them."""

    def __init__(self, model: Any, cache: PagedCache, rows: int, capture: Capture) -> None:
        self._model, self._cache, self._rows = model, cache, rows
        nobody = HostRows(1, (), (), torch.empty(0, cache.width, dtype=torch.int32)).padded(rows, cache.width, cache.spare)
        self._ids = torch.zeros(rows, 1, dtype=torch.long, device=cache.device)
        self._step: Step = model.step(PagedRows.of(nobody, cache.device, fixed=True), cache)
        step = self._step
        self._replay = capture(lambda: model.compute(self._ids, step)[:, -1])

    def run(self, host: HostRows, tokens: Sequence[int]) -> torch.Tensor:
        """Logits ``[len(tokens), vocab]``, which the next call overwrites."""
        more = self._rows - len(tokens)
        self._ids.copy_(torch.tensor([*tokens, *(0,) * more])[:, None])
        self._step = self._model.renew(self._step, host.padded(self._rows, self._cache.width, self._cache.spare))
        return self._replay()[: len(tokens)]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that is written before a replay and read by it."""
        paged = self._step.paged
        assert paged is not None
        yield self._ids
        yield from (paged.rows.cache_rows, paged.rows.positions, paged.rows.places, paged.rows.lengths, paged.rows.tables)
        yield from self._step.rotary or ()
        yield from self._step.tables or ()
        for plan in paged.plans.values():
            yield from plan.tensors()


class GraphDecoder:
    """A decode step recorded for each of ``sizes``; a batch takes the smallest that holds it.

    Its logits are valid until the next call."""

    @torch.inference_mode()
    def __init__(self, model: Any, cache: PagedCache, sizes: Sequence[int], capture: Capture) -> None:
        self._cache = cache
        # The largest first: smaller ones reuse its memory.
        self.fixed = {rows: _Fixed(model, cache, rows, capture) for rows in sorted(sizes, reverse=True)}

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of batches that were recorded."""
        return tuple(sorted(self.fixed))

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], cache_rows: Sequence[int]) -> torch.Tensor:
        host = self._cache.begin(len(tokens), 1, cache_rows)
        logits = self.fixed[min(rows for rows in self.fixed if rows >= len(tokens))].run(host, tokens)
        self._cache.advance(host)
        return logits


def batch_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and ``most``: a batch is padded to less than twice its size."""
    sizes = [1 << i for i in range(most.bit_length())]
    return tuple(dict.fromkeys([*sizes, most]))


def unrecordable(model: Any, device: torch.device) -> str:
    """Why a pass of ``model`` on ``device`` cannot be recorded; empty where it can."""
    if device.type != "cuda":
        return f"the device is {device.type}"
    for module in model.modules():
        host_bound = getattr(module, "host_bound", None)
        reason = host_bound() if host_bound is not None else ""
        if reason:
            return str(reason)
        for backends in map(dist.get_backend_config, _groups(module)):
            if "cuda:nccl" not in backends:
                return f"ranks meet through {backends}, of which no recording can be made"
    return ""


def _groups(module: Any) -> Iterator[dist.ProcessGroup]:
    """The process groups of a layer's collectives."""
    for ranks in (getattr(module, "tp", None), getattr(getattr(module, "groups", None), "everyone", None)):
        if isinstance(ranks, TensorParallel) and ranks.group is not None:
            yield ranks.group


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoder, the batch ``sizes`` that were recorded, and the ``reason`` if none were."""

    decoder: Decoder
    sizes: tuple[int, ...] = ()
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """``used``, ``batch_sizes`` and ``reason``."""
        return {"used": bool(self.sizes), "batch_sizes": list(self.sizes), "reason": self.reason or None}


def decoding(model: Any, cache: PagedCache, *, graphs: bool = True, longest: int | None = None) -> Decoding:
    """Records a pass for each batch size of the cache, if ``graphs`` are wanted and possible.

    ``longest``: the most new tokens of any sequence, if known.  Prefill gives the first token, so answers of one token need no
    recording.

    Raises:
        torch.OutOfMemoryError: no memory for a recording, on one of several ranks.
    """
    if not graphs:
        reason = "not asked for"
    elif longest == 1:
        reason = "answers of one token take no decode step"
    else:
        reason = unrecordable(model, cache.device)
    if not reason:
        try:
            decoder = GraphDecoder(model, cache, batch_sizes(cache.size.rows), CudaCapture(cache.device))
            return Decoding(decoder, decoder.sizes)
        except RuntimeError as error:  # torch's for whatever cannot be recorded, and for memory
            # A pass that cannot be recorded fails on every rank; memory may be short here alone, while others wait in a recording.
            if isinstance(error, torch.OutOfMemoryError) and any(True for module in model.modules() for _ in _groups(module)):
                raise
            reason = str(error).partition("\n")[0]
            _log.warning("CUDA graphs: none, since a pass could not be recorded: %s", reason)
    return Decoding(EagerDecoder(model, cache), reason=reason)
