"""The report of a load, beside its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.fill import Filled
from rtp_llm.loader.kernels import KernelReport
from rtp_llm.plan.budget import Budget
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.plan.views import plan_json


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's load.  Bytes are bytes, ``seconds`` is wall time from the first look at the directory to the finished
    model; ``phases`` splits it.  ``measured_peak_bytes`` is None where the system does not report it."""

    plan: LoadPlan
    budget: Budget
    device: str
    load_method: str
    requested_mode: str
    effective_mode: str
    degraded_reason: str | None
    reasons: tuple[str, ...]
    tier: str | None
    stacked_moe_mode: str
    bytes_read: int
    bytes_copied: int
    bytes_placed: int
    slow_path_weights: int
    measured_peak_bytes: int | None
    phases: Mapping[str, float]
    kernels: KernelReport
    verified: int | None = None

    @classmethod
    def of(cls, context: LoadContext, plan: LoadPlan, filled: Filled, *, kernels: KernelReport, verified: int | None) -> LoadReport:
        """The report of a successful load."""
        selected, moved, settings = filled.selected, filled.moved, context.settings
        return cls(
            plan=plan,
            budget=selected.budget,
            device=str(context.device),
            load_method=selected.decision.method,
            requested_mode=settings.load_method,
            effective_mode=selected.decision.method,
            degraded_reason=selected.decision.degraded_reason,
            reasons=selected.decision.reasons,
            tier=None if selected.tier is None else selected.tier.name.lower(),
            stacked_moe_mode=settings.stacked_moe_mode,
            bytes_read=moved.bytes_read,
            bytes_copied=moved.bytes_copied,
            bytes_placed=moved.bytes_placed,
            slow_path_weights=moved.slow_path,
            measured_peak_bytes=filled.peak_bytes,
            phases=context.clock.seconds,
            kernels=kernels,
            verified=verified,
        )

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def gb_per_s(self) -> float:
        """Bytes read in 10**9 for each second of the transport's phase."""
        return self.bytes_read / 1e9 / max(self.phases["transport"], 1e-9)

    def to_json(self) -> dict[str, Any]:
        """The plan's fields (see :func:`plan_json`) and the load's."""
        return plan_json(self.plan, self.budget) | {
            "device": self.device,
            "load_method": self.load_method,
            "requested_mode": self.requested_mode,
            "effective_mode": self.effective_mode,
            "degraded_reason": self.degraded_reason,
            "reasons": list(self.reasons),
            "tier": self.tier,
            "stacked_moe_mode": self.stacked_moe_mode,
            "bytes_read": self.bytes_read,
            "bytes_copied": self.bytes_copied,
            "bytes_placed": self.bytes_placed,
            "seconds": round(self.seconds, 4),
            "gb_per_s": round(self.gb_per_s, 3),
            "measured_peak_bytes": self.measured_peak_bytes,
            "slow_path_weights": self.slow_path_weights,
            "verified": self.verified,
            "kernels": self.kernels.to_json(),
            "phases": {name: round(seconds, 4) for name, seconds in self.phases.items()},
        }
