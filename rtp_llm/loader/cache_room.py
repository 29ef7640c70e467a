"""Does the KV cache fit beside the weights?  Asked before a byte of weights is read, of all ranks together."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import torch

from rtp_llm.errors import PlanError, Problem
from rtp_llm.layers.cache import CacheSize
from rtp_llm.loader.memory import free_bytes
from rtp_llm.loader.preflight import host
from rtp_llm.parallel.watch import Watch
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.plan import LoadPlan

_log = logging.getLogger("rtp_llm.loader")


def check_cache(size: CacheSize, model: Any, plan: LoadPlan, device: torch.device, watch: Watch, free: int | None = None) -> None:
    """Refuses a cache of ``size`` for a causal ``model`` (on the meta device) that does not fit beside its weights.

    ``free``: bytes that this rank may take; asked of the device unless given.  Ranks that share a device are added up.

    Raises:
        PlanError: the same on every rank, with a problem for each device that is too small, which names sizes that fit.
    """

    def nbytes(size: CacheSize) -> int:
        return size.nbytes(model.cache_shapes, model.dtype)

    free = free_bytes(device) if free is None else free
    _log.info("preflight: KV cache %d bytes (%d sequences, %d pages) beside the weights", nbytes(size), size.slots, size.pages)
    mine = {"device": f"{host()}/{device}", "weights": plan.bytes_resident, "cache": nbytes(size), "free": free}
    asked = [json.loads(text) for text in watch.exchange(json.dumps(mine).encode())]
    problems = []
    for place in sorted({a["device"] for a in asked}):
        sharing = [rank for rank, a in enumerate(asked) if a["device"] == place]
        weights, cache = (sum(asked[rank][what] for rank in sharing) for what in ("weights", "cache"))
        least = min(asked[rank]["free"] for rank in sharing)
        if weights + cache > least:
            problems.append(
                Problem(
                    PlanFault.OUT_OF_MEMORY,
                    f"the weights and the KV cache do not fit on {place.rpartition('/')[2]}",
                    rank=sharing[0],
                    expected=f"{weights} bytes of weights and {cache} of cache ({size.slots} sequences of up to {size.max_length} tokens),"
                    f" for {len(sharing)} rank(s)",
                    actual=f"{least} bytes free",
                    fix=_fix(size, nbytes, (least - weights) // len(sharing)),
                )
            )
    if problems:
        raise PlanError(problems)


def _fix(size: CacheSize, nbytes: Callable[[CacheSize], int], room: int) -> str:
    """Sizes that fit in ``room`` bytes: as many sequences as there is room for, or shorter ones.

    The room is one rank's share: caches of ranks that share a device differ by no more than a head or two.
    """
    batch = _most(size.slots, lambda slots: nbytes(CacheSize.equal(slots, size.max_length)) <= room)
    length = _most(size.max_length, lambda tokens: nbytes(CacheSize.equal(size.slots, tokens)) <= room)
    found = [f"{batch} sequence(s) of {size.max_length} tokens at a time (batch_size)"] if batch else []
    found += [f"{size.slots} of {length} tokens each (prompt and max_new_tokens)"] if length else []
    return f"what fits: {', or '.join(found)}" if found else "use more ranks (tp_size), a narrower dtype, or free memory"


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``limit`` that fits, where less fits whenever more does; 0 where none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
