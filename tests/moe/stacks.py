"""Checkpoints of experts in every layout, written by hand from whole matrices, and a model of nothing but experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from rtp_llm.checkpoint import read_catalog
from rtp_llm.config import ParallelConfig
from rtp_llm.layers.base import expert_slots, param_specs
from rtp_llm.layers.moe import MoE, MoEShape
from rtp_llm.layers.router import Routing
from rtp_llm.loader.fill.placement import Placement, allocate
from rtp_llm.parallel.experts import Ownership, PhysicalToLogical
from rtp_llm.parallel.groups import groups_at
from rtp_llm.plan.budget import ReaderLimits
from rtp_llm.plan.experts import ExpertNames, expert_rules
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.plan.rules import Mapping, Rule
from rtp_llm.transport.interface import NoProgress
from rtp_llm.transport.scratch.reader import ScratchTransport
from tests.support.plans import joined

AT = "model.layers.{}.mlp.experts"


@dataclass(frozen=True)
class Sizes:
    """Of a model of nothing but experts."""

    layers: int
    experts: int
    intermediate: int
    hidden: int


@dataclass(frozen=True)
class Layout:
    """Of one layer: ``gate_up`` is ``fused`` in one stack, or ``gate`` and ``up`` are each stacked or not; ``suffix`` of stacks."""

    fused: bool
    stacked: frozenset[str]
    suffix: str = ""

    @property
    def names(self) -> dict[str, str]:
        """How the plan calls the layout of each weight."""
        apart = len(self.stacked & {"gate", "up"})
        gate_up = "STACKED" if self.fused or apart == 2 else "MIXED" if apart else "PER_EXPERT"
        return {"gate_up": gate_up, "down": "STACKED" if "down" in self.stacked else "PER_EXPERT"}


def matrices(sizes: Sizes) -> dict[str, torch.Tensor]:
    """Whole experts ``{layer}.{part} [E, out, in]`` and routers ``{layer}.router``, no two elements of which are equal."""
    outward, inward = (sizes.intermediate, sizes.hidden), (sizes.hidden, sizes.intermediate)
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(sizes.layers):
        shapes |= {f"{layer}.{part}": (sizes.experts, *shape) for part, shape in (("gate", outward), ("up", outward), ("down", inward))}
        shapes[f"{layer}.router"] = (sizes.experts, sizes.hidden)
    made, start = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + count, dtype=torch.float32).reshape(shape)
        start += count
    return made


def tensors(whole: dict[str, torch.Tensor], layouts: Iterable[Layout], transposed: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors, by name."""
    made: dict[str, torch.Tensor] = {}
    for layer, layout in enumerate(layouts):
        at = AT.format(layer)
        made[f"model.layers.{layer}.mlp.gate.weight"] = whole[f"{layer}.router"]
        stacks = {f"{part}_proj": whole[f"{layer}.{part}"] for part in layout.stacked if not (layout.fused and part != "down")}
        if layout.fused:
            stacks["gate_up_proj"] = torch.cat([whole[f"{layer}.gate"], whole[f"{layer}.up"]], dim=1)
        for name, stack in stacks.items():
            made[f"{at}.{name}{layout.suffix}"] = (stack.transpose(1, 2) if transposed else stack).contiguous()
        for part in {"gate", "up", "down"} - layout.stacked - ({"gate", "up"} if layout.fused else set()):
            made |= {f"{at}.{e}.{part}_proj.weight": matrix.clone() for e, matrix in enumerate(whole[f"{layer}.{part}"])}
    return made


def mapping(sizes: Sizes, transposed: bool) -> Mapping:
    """The orientation is declared here, once."""
    router = Rule("model.layers.{}.mlp.gate.weight", "layers.{}.router.weight")
    return Mapping((router, *expert_rules(sizes.experts, ExpertNames(AT, transposed=transposed))))


def save(folder: Path, content: dict[str, torch.Tensor]) -> None:
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})


def planned(
    folder: Path, sizes: Sizes, parallel: ParallelConfig, transposed: bool = False, table: PhysicalToLogical | None = None
) -> tuple[nn.ModuleList, LoadPlan]:
    """One rank's model on the meta device, and its plan; ``table`` says which experts are copied where."""
    shape = MoEShape(sizes.hidden, sizes.intermediate, "silu", Routing(sizes.experts, 1))
    groups = groups_at(parallel)
    if table is not None:
        groups = replace(groups, ep=replace(groups.ep, ownership=Ownership(parallel.ep_size, table)))
    model = nn.ModuleList(MoE(i, shape, groups=groups, dtype=torch.float32) for i in range(sizes.layers))
    specs, experts = param_specs(model), expert_slots(model)
    plan = joined(read_catalog(folder), mapping(sizes, transposed), specs, parallel=parallel, experts=experts)
    return model, plan


def loaded(folder: Path, model: nn.ModuleList, plan: LoadPlan) -> None:
    """Carries the plan out, with buffers so small that tensors arrive in parts."""
    params = allocate(model, plan, torch.device("cpu"))
    ScratchTransport(str(folder), torch.device("cpu"), ReaderLimits(2, 256, 1 << 17, 1, 1 << 20)).deliver(
        plan, Placement(params), NoProgress(), lambda: None
    )
