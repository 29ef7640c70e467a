"""Plans for bare tensors, a sink that keeps what it is given, and checkpoints of every dtype."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from rtp_llm.checkpoint import read_catalog
from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.plan.boxes import Box, extent, view, whole
from rtp_llm.plan.ops import Op
from rtp_llm.plan.pieces import ParamSpec, Piece
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.rules import Mapping, Rule
from rtp_llm.transport.interface import Place
from tests.support.plans import joined


class Collect:
    """A sink that keeps what it is given, and counts how often."""

    def __init__(self, plan: LoadPlan) -> None:
        self.memory = {p.name: torch.zeros(p.shape, dtype=getattr(torch, p.dtype)) for p in plan.model.params}
        self.placed = 0

    def direct(self, part: Delivery) -> Place | None:
        raise AssertionError("this transport places")

    def stop(self) -> None:
        """Nobody waits here."""

    def place_all(self, items: Sequence[tuple[Delivery, torch.Tensor]]) -> None:
        for part, content in items:
            self.place(part, content)

    def place(self, part: Delivery, content: torch.Tensor) -> None:
        assert tuple(content.shape) == extent(part.raw_box), (content.shape, part.raw_box)
        self.placed += 1
        for target in part.targets:
            place = view(self.memory[target.param], target.box)
            place.copy_(part.source.apply(content, part.slot_box))


def plan_for(directory: Path, box_of: Callable[[TensorInfo], Box], ops: tuple[Op, ...] = ()) -> LoadPlan:
    """One parameter a tensor, holding a box of it."""
    catalog = read_catalog(directory)
    catalog.raise_for_problems()
    specs = []
    for info in catalog.tensors:
        shape = info.shape
        for op in ops:
            shape = op.out_shape(shape)
        box = box_of(info)
        local = extent(box)
        specs.append(ParamSpec(info.name, local, str(DTYPES[info.dtype].torch_name), (Piece(info.name, shape, box, whole(local)),)))
    mapping = Mapping(tuple(Rule(t.name, t.name, ops) for t in catalog.tensors))
    plan = joined(catalog, mapping, specs)
    plan.raise_for_problems()
    return plan


def everything(info: TensorInfo) -> Box:
    return whole(info.shape)


def rows_of(rank: int, size: int) -> Callable[[TensorInfo], Box]:
    """This rank's rows of tensors with two dimensions, and all of others."""

    def box(info: TensorInfo) -> Box:
        if len(info.shape) < 2:
            return whole(info.shape)
        n = info.shape[0]
        return ((rank * n // size, (rank + 1) * n // size), *whole(info.shape[1:]))

    return box


def save_every_dtype(directory: Path) -> dict[str, torch.Tensor]:
    """Random bits of every dtype that torch and safetensors share, odd sizes, scalars and empties, in three files."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for info in DTYPES.values():
        if info.torch_name and info.packed == 1 and hasattr(torch, info.torch_name):
            raw = torch.randint(0, 2 if info.name == "BOOL" else 256, (33, 7 * info.bits // 8), dtype=torch.uint8)
            tensors[info.name] = raw.view(getattr(torch, info.torch_name))
    tensors |= {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "thin": torch.randn(5, 0),
        "odd": torch.randint(0, 9, (13,), dtype=torch.int8),
    }
    assert len(tensors) >= 20
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    for number in range(3):
        part = {name: tensors[name] for name in names[number::3]}
        save_file(part, directory / f"model-{number + 1:05d}-of-00003.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
