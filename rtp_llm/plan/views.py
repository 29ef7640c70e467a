"""A plan as JSON, for programs and for other ranks; the terminal's tables are made from it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rtp_llm.plan.plan import LoadPlan


def plan_json(plan: LoadPlan) -> dict[str, Any]:
    """The stable fields of a plan.

    ``parameters`` counts elements, ``tensors`` parameter tensors; ``bytes_*`` and ``predicted_peak_bytes`` are this
    rank's; ``files`` lists what is read of each file; ``missing`` and ``unexpected`` are names of checkpoint tensors;
    ``skipped`` has a reason for each.
    """
    read: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for delivery in plan.deliveries:
        read[delivery.tensor.file] += delivery.nbytes
        tensors[delivery.tensor.file] += 1
    return {
        "digest": plan.digest,
        "architecture": plan.architecture,
        "family": plan.family,
        "dtype": plan.dtype,
        "tp_size": plan.parallel.tp_size,
        "tp_rank": plan.parallel.tp_rank,
        "ep_size": plan.parallel.ep_size,
        "ep_rank": plan.parallel.ep_rank,
        "parameters": plan.parameters,
        "tensors": len(plan.params),
        "bytes_resident": plan.bytes_resident,
        "bytes_read": plan.bytes_read,
        "bytes_staging": plan.bytes_staging,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "files": [
            {"name": f.name, "format": f.format, "bytes": f.size, "bytes_read": read[f.name], "reads": tensors[f.name]} for f in plan.files
        ],
        "missing": list(plan.missing),
        "unexpected": list(plan.unexpected),
        "skipped": [{"tensor": s.raw, "reason": s.reason} for s in plan.skipped],
        "notes": [n.to_json() for n in plan.notes],
    }
