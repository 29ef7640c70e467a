"""Checks, for all ranks together and before anything is allocated, that the load fits."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rtp_llm.errors import PlanError, Problem
from rtp_llm.loader.budget.memory import free_bytes
from rtp_llm.loader.context import LoadContext
from rtp_llm.parallel.watch import Watch
from rtp_llm.plan.budget import Budget
from rtp_llm.plan.faults import PlanFault

_log = logging.getLogger("rtp_llm.loader")


@dataclass(frozen=True, slots=True)
class SharedDevice:
    """A device (the CPU, or one GPU) and the ranks that share it, whose needs are added up.

    ``needs``: bytes of each rank, by purpose; ``free``: the least that any of the ranks found free.
    """

    name: str
    ranks: tuple[int, ...]
    needs: tuple[dict[str, int], ...]
    free: int

    def total(self, what: str) -> int:
        """Bytes that all its ranks need for ``what``."""
        return sum(needs[what] for needs in self.needs)

    @property
    def short(self) -> bool:
        """Whether it is too small."""
        return sum(sum(needs.values()) for needs in self.needs) > self.free


def shared_devices(watch: Watch, device: torch.device, needs: dict[str, int], free: int) -> list[SharedDevice]:
    """All devices of the launch, the same on every rank; ``needs`` and ``free`` are this rank's bytes on ``device``."""
    replies = watch.all_gather_json({"device": f"{host()}/{device}", "needs": needs, "free": free})
    found = []
    for name in sorted({reply["device"] for reply in replies}):
        ranks = tuple(rank for rank, reply in enumerate(replies) if reply["device"] == name)
        of_ranks: list[dict[str, Any]] = [replies[rank] for rank in ranks]
        least = min(reply["free"] for reply in of_ranks)
        found.append(SharedDevice(name.rpartition("/")[2], ranks, tuple(reply["needs"] for reply in of_ranks), least))
    return found


def preflight(context: LoadContext, budget: Budget) -> None:
    """Compares each rank's predicted peak with its free memory.

    Raises:
        PlanError: the same on every rank, with a problem for each device that is too small.
    """
    problems = list(shortages(context, budget, free_bytes(context.device)))
    if problems:
        raise PlanError(problems)


def shortages(context: LoadContext, budget: Budget, free: int) -> Iterator[Problem]:
    """A problem for each device that is too small for the budgets of its ranks, the same on every rank.

    ``free``: bytes that this rank may take.
    """
    _log.info(
        "preflight: predicted peak %d bytes (weights %d, transport %d, making %d, largest transient %d), free %d bytes on %s",
        budget.peak,
        budget.resident,
        budget.staging,
        budget.derived,
        budget.transient,
        free,
        context.device,
    )
    for device in shared_devices(context.watch, context.device, {"peak": budget.peak}, free):
        if device.short:
            peak = device.total("peak")
            yield Problem(
                PlanFault.OUT_OF_MEMORY,
                f"the load does not fit on {device.name}",
                rank=device.ranks[0],
                expected=f"{peak} bytes for {len(device.ranks)} rank(s): weights, staging buffers, what is made, the largest transient",
                actual=f"{device.free} bytes free",
                fix="use more ranks (tp_size), a narrower dtype, or free memory",
            )


def host() -> str:
    """This machine's identity within a launch: the kernel's boot id."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()
