"""Does the load fit?  Asked before anything is allocated, of all ranks together."""

from __future__ import annotations

import json
import logging

import torch

from rtp_llm.errors import PlanError, Problem
from rtp_llm.loader.memory import free_bytes
from rtp_llm.parallel.watch import Watch
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.plan import LoadPlan

_log = logging.getLogger("rtp_llm.loader")


def preflight(plan: LoadPlan, device: torch.device, watch: Watch) -> None:
    """Compares each rank's predicted peak with its free memory.

    Raises:
        PlanError: the same on every rank, with a problem for each device that is too small.
    """
    problems = shortages(plan, device, watch, free_bytes(device))
    if problems:
        raise PlanError(problems)


def shortages(plan: LoadPlan, device: torch.device, watch: Watch, free: int) -> list[Problem]:
    """A problem for each device that is too small for the plan, the same on every rank.

    ``free``: bytes that this rank may take.  Ranks that share a device (the CPU, or one GPU) are added up: each alone would
    see the memory of all as its own.
    """
    _log.info(
        "preflight: predicted peak %d bytes (weights %d, transport %d, making %d, largest transient %d), free %d bytes on %s",
        plan.predicted_peak_bytes,
        plan.bytes_resident,
        plan.bytes_staging,
        plan.bytes_making,
        plan.bytes_transient,
        free,
        device,
    )
    mine = {"device": f"{host()}/{device}", "peak": plan.predicted_peak_bytes, "free": free}
    asked = [json.loads(text) for text in watch.exchange(json.dumps(mine).encode())]
    problems = []
    for place in sorted({a["device"] for a in asked}):
        sharing = [rank for rank, a in enumerate(asked) if a["device"] == place]
        peak, least = sum(asked[r]["peak"] for r in sharing), min(asked[r]["free"] for r in sharing)
        if peak > least:
            problems.append(
                Problem(
                    PlanFault.OUT_OF_MEMORY,
                    f"the load does not fit on {place.rpartition('/')[2]}",
                    rank=sharing[0],
                    expected=f"{peak} bytes for {len(sharing)} rank(s): weights, staging buffers, what is made, the largest transient",
                    actual=f"{least} bytes free",
                    fix="use more ranks (tp_size), a narrower dtype, or free memory",
                )
            )
    return problems


def host() -> str:
    """What tells machines apart in one launch: the kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
