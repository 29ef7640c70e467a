"""A plan as JSON, for programs; the terminal's tables are rendered from it."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from rtp_llm.checkpoint.dtypes import DTYPES_BY_TORCH_NAME
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.budget import Budget
from rtp_llm.plan.plan import LoadPlan


def plan_json(plan: LoadPlan, budget: Budget) -> dict[str, Any]:
    """The stable fields of a plan and of its ``budget``.

    ``parameters`` counts elements, ``tensors`` parameter tensors; ``bytes_*`` and ``predicted_peak_bytes`` are this
    rank's; ``files`` lists what is read of each file; ``missing`` and ``unexpected`` are names of checkpoint tensors;
    ``skipped`` has a reason for each; ``experts`` is :func:`expert_table`, ``quantization`` :func:`quantization_json`.
    """
    read: Counter[str] = Counter()
    tensors: Counter[str] = Counter()
    for delivery in plan.deliveries:
        read[delivery.tensor.file] += delivery.nbytes
        tensors[delivery.tensor.file] += 1
    return {
        "digest": plan.digest,
        "architecture": plan.model.architecture,
        "family": plan.model.family,
        "dtype": plan.model.dtype,
        "tp_size": plan.model.parallel.tp_size,
        "tp_rank": plan.model.parallel.tp_rank,
        "ep_size": plan.model.parallel.ep_size,
        "ep_rank": plan.model.parallel.ep_rank,
        "parameters": plan.model.parameters,
        "tensors": len(plan.model.params),
        "bytes_resident": plan.bytes_resident,
        "bytes_read": plan.bytes_read,
        **budget.to_json(),
        "files": [
            {"name": f.name, "format": f.format, "bytes": f.size, "bytes_read": read[f.name], "reads": tensors[f.name]}
            for f in plan.catalog.files
        ],
        "experts": expert_table(plan),
        "missing": list(plan.missing),
        "unexpected": list(plan.unexpected),
        "skipped": [{"tensor": s.raw, "reason": s.reason} for s in plan.skipped],
        "quantization": quantization_json(plan),
        "notes": [n.to_json() for n in plan.catalog.notes],
    }


def quantization_json(plan: LoadPlan) -> dict[str, Any] | None:
    """``method``; ``schemes``, with the number of modules that have each; ``lists``, with the number of modules that each entry
    matched; ``undeclared``: plain modules that the declaration says nothing of.  None for plain weights."""
    found = plan.model.quantization
    if found is None:
        return None
    return {
        "method": found.method,
        "schemes": [{"scheme": label, "modules": count} for label, count in found.schemes],
        "lists": [{"entry": listed.entry, "matched": listed.matched} for listed in found.listed],
        "undeclared": list(found.undeclared),
    }


def expert_table(plan: LoadPlan) -> list[dict[str, Any]]:
    """Which expert-parallel rank holds which experts, and how the checkpoint stores them; equal layers share an entry.

    ``bytes`` are those of one layer's experts on one of the rank's tensor-parallel ranks; an expert that a rank holds twice
    counts twice.  Empty for a model without experts.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    found: dict[int, list[tuple[str, str]]] = {}
    for (number, weight), layout in plan.expert_layouts().items():
        found.setdefault(number, []).append((weight, layout.name))
    for layer in plan.model.experts:
        layouts = tuple(found.get(layer.layer, ()))
        alike.setdefault((layer.count, layer.held, layer.parts, layouts), []).append(layer.layer)
    return [
        {
            "layers": layers,
            "count": count,
            "layout": {weight: name.lower().replace("_", "-") for weight, name in layouts},
            "ranks": [
                {"ep_rank": rank, "experts": list(experts), "bytes": len(experts) * _expert_bytes(parts) // plan.model.parallel.tp_size}
                for rank, experts in enumerate(held)
            ],
        }
        for (count, held, parts, layouts), layers in alike.items()
    ]


def _expert_bytes(parts: tuple[tuple[str, Shape, str], ...]) -> int:
    return sum(prod(shape) * DTYPES_BY_TORCH_NAME[dtype].bits // 8 for _, shape, dtype in parts)
