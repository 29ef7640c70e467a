"""The facts that the choice of a transport depends on: of this rank, and combined for all ranks."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import torch

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.config.load import StackedMode
from rtp_llm.loader.budget.memory import free_bytes
from rtp_llm.loader.budget.preflight import host
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.prepare import Prepared
from rtp_llm.parallel.watch import Watch
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport import pagecache
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier
from rtp_llm.transport.fastsafetensors.sequence import local_pieces, splits
from rtp_llm.transport.policy import Facts, compares


class PageCache:
    """How much of each of a plan's files is in the page cache; looked up once, on first use."""

    def __init__(self, plan: LoadPlan) -> None:
        self.directory, self.sizes = Path(plan.catalog.directory), {f.name: f.size for f in plan.catalog.files}

    @cached_property
    def bytes(self) -> dict[str, int]:
        """Estimated bytes by file."""
        return {name: pagecache.estimated_cached_bytes(self.directory / name) or 0 for name in self.sizes}

    def crowded(self) -> bool:
        """Whether the uncached rest of the checkpoint exceeds free memory, so that caching it evicts other files."""
        return sum(self.sizes.values()) - sum(self.bytes.values()) > free_bytes(torch.device("cpu"))


def find_facts(context: LoadContext, prepared: Prepared, config: EffectiveConfig, gpudirect: bool, cache: PageCache) -> Facts:
    """This rank's facts, as if it were alone on its host."""
    plan = prepared.plan
    where = pagecache.file_system(cache.directory)
    network = where is not None and where.network
    warm = whole = fetched = 0
    if compares(context.settings.load_method, context.world.size):
        whole, warm = sum(cache.sizes.values()), sum(cache.bytes.values())
        # On a local disk, other ranks find in the cache what one rank has read.
        pieces = local_pieces(plan, splits(plan.slots, StackedMode.PER_EXPERT), whole) if network else ()
        fetched = sum(piece.stop - piece.start for piece in pieces) if network else plan.bytes_read
    return Facts(
        all_safetensors=all(f.format == "safetensors" for f in plan.catalog.files),
        unindexed=any(note.fault is CheckpointFault.OUTSIDE_INDEX for note in plan.catalog.notes),
        device_type=context.device.type,
        ranks=context.world.size,
        hosts=1,
        file_system="unknown" if where is None else where.kind,
        network=network,
        gpudirect=gpudirect or config.loader == "3fs",
        bytes_cold=whole - warm,
        bytes_warm=warm,
        bytes_ranks=fetched,
    )


def combine_facts(absent: str, mine: Facts, watch: Watch) -> tuple[str, Facts]:
    """Combine all ranks' facts; also the reason if any rank lacks the package (else empty)."""
    message = {"absent": absent, "host": host(), "facts": asdict(mine)}
    replies = watch.all_gather_json(message)
    lacking = next((rank for rank, reply in enumerate(replies) if reply["absent"]), None)
    every = [Facts(**reply["facts"]) for reply in replies]
    coldest = max(every, key=lambda facts: facts.bytes_cold)
    facts = replace(
        coldest,
        device_type="cpu" if any(f.device_type == "cpu" for f in every) else coldest.device_type,
        hosts=len({reply["host"] for reply in replies}),
        network=any(f.network for f in every),
        gpudirect=all(f.gpudirect for f in every),
        bytes_ranks=sum(f.bytes_ranks for f in every),
    )
    return "" if lacking is None else _of_rank(lacking, replies[lacking]["absent"], len(replies)), facts


def combine_capabilities(mine: Capabilities, watch: Watch) -> Capabilities:
    """The lowest tier of all ranks, with its reason; the same on every rank."""
    message = {"tier": int(mine.tier), "reason": mine.reason}
    replies = watch.all_gather_json(message)
    worst = min(range(len(replies)), key=lambda rank: replies[rank]["tier"])
    return replace(mine, tier=Tier(replies[worst]["tier"]), reason=_of_rank(worst, replies[worst]["reason"], len(replies)))


def _of_rank(rank: int, reason: str, ranks: int) -> str:
    return reason if ranks == 1 else f"rank {rank}: {reason}"
