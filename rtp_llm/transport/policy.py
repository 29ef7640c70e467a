"""Which transport moves a load's bytes: one pure decision, with its reasons."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rtp_llm.config.load import StackedMode
from rtp_llm.transport.fastsafetensors.probe import Capabilities, Tier

SCRATCH, FASTSAFETENSORS = "scratch", "fastsafetensors"


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a load before a byte of weights is read, the same on every rank.

    ``bytes_warm``: the checkpoint's bytes in the page cache of the host that has least of it; ``bytes_cold``: the others.
    ``bytes_ranks``: fetched by all ranks if each reads for itself, in whole rows, because of read-ahead.  These three are 0 where
    nothing depends on them (:func:`compares`).  ``unindexed``: files hold tensors that the index does not list.
    """

    all_safetensors: bool
    unindexed: bool
    device_type: str
    ranks: int
    hosts: int
    file_system: str
    network: bool
    gpudirect: bool
    bytes_cold: int
    bytes_warm: int
    bytes_ranks: int


@dataclass(frozen=True, slots=True)
class Decision:
    """``level``: of its log record.  ``degraded_reason``: None unless this is a fall-back."""

    method: str
    requested: str
    stacked_moe_mode: StackedMode
    level: int
    degraded_reason: str | None
    reasons: tuple[str, ...]

    @property
    def text(self) -> str:
        """The decision for the log."""
        if self.degraded_reason is not None:
            return (
                f"fastsafetensors falls back to scratch: requested_mode={self.requested} effective_mode={self.method} "
                f"degraded_reason={self.degraded_reason}"
            )
        return f"load_method {self.requested} is {self.method}: {'; '.join(self.reasons)}"


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second from storage, and from the page cache."""

    cold: float
    warm: float


#: Measured on one H200 host (benchmark/fastsafetensors.md): buffered reads by own threads; the package, buffered, placing
#: from chunks.  A local disk gives both the same; each rate is that of one host.
_LOCAL = {SCRATCH: Rates(1.7e9, 37e9), FASTSAFETENSORS: Rates(1.7e9, 25e9)}
#: A network file system serves all ranks together at about this rate (25 Gbit/s); its client's cache is like a local disk's.
#: An assumption, not a measurement: the decision depends on how often bytes are fetched far more than on the rate.
_NETWORK_COLD = 2.0e9
#: Bytes a second of a broadcast between GPUs of one host (4 MiB messages: the slowest measured).
_BROADCAST = 150e9


def compares(load_method: str, ranks: int) -> bool:
    """Whether estimates may decide: then the page cache and the bytes of all ranks have to be found out."""
    return load_method == "auto" and ranks > 1


def decided(load_method: str, stacked_moe_mode: StackedMode, facts: Facts, absent: str = "") -> Decision | None:
    """The decision, if it does not depend on the package's capabilities; importing it takes longer than everything else here.

    Args:
        absent: why there is no package on some rank; empty where all have one.
    """
    lack = _precondition(load_method, facts) or absent
    if lack:
        return _scratch(load_method, stacked_moe_mode, lack, logging.INFO)
    if load_method == "auto":
        cheaper, why = _cheaper(facts)
        if cheaper == SCRATCH:
            return _scratch(load_method, stacked_moe_mode, why)
    return None


def decide(
    load_method: str, stacked_moe_mode: StackedMode, facts: Facts, capabilities: Capabilities, shortage: str | None = None
) -> Decision:
    """The transport for a load.

    Args:
        load_method: ``auto`` or ``fastsafetensors``.
        stacked_moe_mode: as asked for; kept in the decision.
        facts, capabilities: of all ranks together; capabilities of the least able one.
        shortage: why fastsafetensors does not fit into memory, if it does not.
    """
    early = decided(load_method, stacked_moe_mode, facts, capabilities.reason if capabilities.tier is Tier.ABSENT else "")
    if early is not None:
        return early
    lack = _tier(facts, capabilities) or shortage
    if lack:
        return _scratch(load_method, stacked_moe_mode, lack, logging.WARNING)
    reasons = (_cheaper(facts)[1] if load_method == "auto" else "it was asked for", *_ways(facts, capabilities))
    return Decision(FASTSAFETENSORS, load_method, stacked_moe_mode, logging.INFO, None, reasons)


def asked_for(stacked_moe_mode: StackedMode) -> Decision:
    """The settings name the own reader, which nothing overrules."""
    return _scratch(SCRATCH, stacked_moe_mode, "it was asked for")


def _scratch(load_method: str, stacked_moe_mode: StackedMode, reason: str, falls_back: int | None = None) -> Decision:
    """The own reader; ``falls_back``: the log level, where this is a fall-back."""
    degraded = None if falls_back is None else reason
    return Decision(SCRATCH, load_method, stacked_moe_mode, falls_back or logging.INFO, degraded, (reason,))


def _precondition(load_method: str, facts: Facts) -> str:
    if not facts.all_safetensors:
        return "not all files are safetensors"
    if facts.device_type == "cpu" and load_method == "auto":
        return "the device is the CPU"
    return ""


def _tier(facts: Facts, capabilities: Capabilities) -> str:
    if capabilities.tier < Tier.WHOLE:
        return capabilities.reason
    if capabilities.tier < Tier.BOUNDED and facts.ranks > 1:
        return f"the installed wheel delivers whole files to one rank only: {capabilities.reason}"
    if capabilities.tier < Tier.BOUNDED and facts.unindexed:
        return "tensor names are not unique: files hold tensors that the index does not name, and the installed wheel yields them too"
    return ""


def _cheaper(facts: Facts) -> tuple[str, str]:
    """The cheaper transport: each rank reads its part, or each file is read once and broadcast."""
    if facts.gpudirect:
        return FASTSAFETENSORS, "storage can be read straight into the device"
    if facts.ranks == 1:
        return SCRATCH, "one rank reads each byte once either way, and the own reader needs no chunks on the device"
    alone = _seconds(facts, SCRATCH, max(1.0, facts.bytes_ranks / max(1, facts.bytes_cold + facts.bytes_warm)))
    whole = facts.bytes_cold + facts.bytes_warm
    once = _seconds(facts, FASTSAFETENSORS, 1.0) + whole / _BROADCAST
    cheaper = FASTSAFETENSORS if once < alone else SCRATCH
    share = 100 * facts.bytes_warm / whole if whole else 100.0
    return cheaper, (
        f"{'network' if facts.network else 'local'} storage ({facts.file_system}), {share:.0f}% in the page cache, "
        f"{facts.ranks} rank(s) on {facts.hosts} host(s): rank-local reads are estimated at {alone:.3g} s, fastsafetensors at {once:.3g} s"
    )


def _seconds(facts: Facts, method: str, times: float) -> float:
    """Seconds to read the checkpoint, if all ranks together fetch ``times`` its size.

    Local: one rank reads from the disk, the others from the page cache, and each copies only its part.  Network: the servers
    serve each rank separately, at the same time.
    """
    rates = _LOCAL[method]
    cold = facts.bytes_cold * times / _NETWORK_COLD if facts.network else facts.bytes_cold / rates.cold
    return cold + facts.bytes_warm / rates.warm


def _ways(facts: Facts, capabilities: Capabilities) -> tuple[str, ...]:
    """How fastsafetensors reads, for the report."""
    if capabilities.tier >= Tier.BOUNDED:
        each = "each file is read once and broadcast" if facts.ranks > 1 else "only what the rank needs is read, in chunks"
        return (each, "experts are split and filtered here")
    split = "by the wheel" if capabilities.stacked_split else "here"
    filtered = "by the wheel" if capabilities.copyout_filter else "here, after delivery"
    return (f"whole files are read; experts are split {split}, and tensors filtered {filtered}",)
