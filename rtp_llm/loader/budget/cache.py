"""Checks, for all ranks together and before a byte of weights is read, that the KV cache fits beside the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rtp_llm.errors import PlanError, Problem
from rtp_llm.layers.cache import CacheSize
from rtp_llm.loader.budget.memory import free_bytes
from rtp_llm.loader.budget.preflight import shared_devices
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.prepare import Prepared
from rtp_llm.plan.faults import PlanFault

_log = logging.getLogger("rtp_llm.loader")


def check_cache(context: LoadContext, size: CacheSize, prepared: Prepared, free: int | None = None) -> None:
    """Refuses a KV cache of ``size`` that does not fit beside the weights of a causal model.

    ``free``: bytes that this rank may take; the device's free memory unless given.  Ranks that share a device are added up.

    Raises:
        PlanError: the same on every rank, with a problem for each device that is too small, which names sizes that fit.
    """
    model: Any = prepared.model

    def nbytes(size: CacheSize) -> int:
        return size.nbytes(model.cache_shapes, model.dtype)

    _log.info("preflight: KV cache %d bytes (%d sequences, %d pages) beside the weights", nbytes(size), size.rows, size.pages)
    needs = {"weights": prepared.plan.bytes_resident, "cache": nbytes(size)}
    free = free_bytes(context.device) if free is None else free
    problems = []
    for device in shared_devices(context.watch, context.device, needs, free):
        weights, cache = device.total("weights"), device.total("cache")
        if device.short:
            problems.append(
                Problem(
                    PlanFault.OUT_OF_MEMORY,
                    f"the weights and the KV cache do not fit on {device.name}",
                    rank=device.ranks[0],
                    expected=f"{weights} bytes of weights and {cache} of cache ({size.rows} sequences of up to {size.max_length} tokens),"
                    f" for {len(device.ranks)} rank(s)",
                    actual=f"{device.free} bytes free",
                    fix=_fix(size, nbytes, (device.free - weights) // len(device.ranks)),
                )
            )
    if problems:
        raise PlanError(problems)


def _fix(size: CacheSize, nbytes: Callable[[CacheSize], int], room: int) -> str:
    """Sizes that fit in ``room`` bytes: as many sequences as there is room for, or shorter ones.

    The room is one rank's share: caches of ranks that share a device differ by no more than a head or two.
    """
    batch = _most(size.rows, lambda rows: nbytes(CacheSize.equal(rows, size.max_length)) <= room)
    length = _most(size.max_length, lambda tokens: nbytes(CacheSize.equal(size.rows, tokens)) <= room)
    found = [f"{batch} sequence(s) of {size.max_length} tokens at a time (batch_size)"] if batch else []
    found += [f"{size.rows} of {length} tokens each (prompt and max_new_tokens)"] if length else []
    return f"what fits: {', or '.join(found)}" if found else "use more ranks (tp_size), a narrower dtype, or free memory"


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, by bisection; 0 where none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
