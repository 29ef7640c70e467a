"""Bytes find their places by every road of the reader: right into memory, staged for a device, cast, in parts, in blocks and batches."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from rtp_llm.checkpoint import read_catalog
from rtp_llm.loader.fill.placement import Placement
from rtp_llm.plan.budget import ReaderLimits
from rtp_llm.plan.pieces import ParamSpec, Piece
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.plan.rules import Mapping, Rule
from rtp_llm.transport.interface import Memory, NoProgress, Place
from rtp_llm.transport.scratch.reader import ScratchTransport
from tests.support.plans import joined

#: Stored dtype and that of the parameter.
DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.uint8, torch.uint8),
    (torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
)


class OnDevice(Placement):
    """Memory that cannot be read into, as a GPU's."""

    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        super().__init__(params)
        self._closed: dict[Memory, Memory] = {}

    def direct(self, part: Delivery) -> Place | None:
        place = super().direct(part)
        if place is None:
            return None
        memory = self._closed.setdefault(place.memory, Memory(place.memory.tensor, None))
        return Place(memory, place.at, place.nbytes)


@dataclass(frozen=True)
class Stack:
    """A parameter ``[experts, rows, columns]``; of each expert's stored matrix it holds a box, with a margin before and behind."""

    dtypes: tuple[torch.dtype, torch.dtype]
    experts: int
    rows: int
    columns: int
    margins: tuple[int, int, int, int]

    def stored(self, generator: torch.Generator) -> list[torch.Tensor]:
        above, below, left, right = self.margins
        shape = (self.experts, above + self.rows + below, left + self.columns + right)
        codes = torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8)
        stored = self.dtypes[0]
        return list(codes.view(stored) if stored.itemsize == 1 else codes.to(stored))

    def spec(self, name: str, whole: tuple[int, ...]) -> ParamSpec:
        above, _, left, _ = self.margins
        box, at = ((above, above + self.rows), (left, left + self.columns)), ((0, self.rows), (0, self.columns))
        pieces = tuple(Piece(f"{name}.e{expert}", whole, box, ((expert, expert + 1), *at)) for expert in range(self.experts))
        return ParamSpec(name, (self.experts, self.rows, self.columns), str(self.dtypes[1]).removeprefix("torch."), pieces)

    def wanted(self, stored: list[torch.Tensor]) -> torch.Tensor:
        above, _, left, _ = self.margins
        boxes = [matrix[above : above + self.rows, left : left + self.columns] for matrix in stored]
        return torch.stack([box.to(self.dtypes[1]) for box in boxes])


MARGIN = st.one_of(st.just(0), st.integers(0, 20))
STACKS = st.builds(
    Stack, st.sampled_from(DTYPES), st.integers(1, 12), st.integers(1, 9), st.integers(1, 70), st.tuples(MARGIN, MARGIN, MARGIN, MARGIN)
)


def planned(folder: Path, stacks: list[Stack], order: st.DataObject) -> tuple[LoadPlan, dict[str, torch.Tensor]]:
    """The plan for a file that holds the stacks' matrices in any order, and what parameters are to hold."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    specs = []
    for number, stack in enumerate(stacks):
        name, stored = f"p{number}", stack.stored(generator)
        tensors |= {f"{name}.e{expert}": matrix.contiguous() for expert, matrix in enumerate(stored)}
        specs.append(stack.spec(name, tuple(stored[0].shape)))
        wanted[name] = stack.wanted(stored)
    # safetensors puts tensors in the order of their names, those of a dtype's size together.
    raw = {f"t{place:03}": slot for place, slot in enumerate(order.draw(st.permutations(list(tensors))))}
    save_file({name: tensors[slot] for name, slot in raw.items()}, folder / "model.safetensors")
    catalog = read_catalog(folder)
    catalog.raise_for_problems()
    rules = Mapping(tuple(Rule(name, slot) for name, slot in raw.items()))
    plan = joined(catalog, rules, specs)
    plan.raise_for_problems()
    return plan, wanted


@settings(max_examples=40, deadline=None)
@given(
    st.lists(STACKS, min_size=1, max_size=5),
    st.sampled_from((Placement, OnDevice)),
    st.sampled_from((64, 512, 4096, 1 << 20)),
    st.sampled_from((0, 8, 1 << 17)),
    st.data(),
)
def test_every_road_ends_where_it_should(
    stacks: list[Stack], sink: type[Placement], buffer_bytes: int, most_gap: int, order: st.DataObject
) -> None:
    """Stacks of any sizes and dtypes, rows and columns of their matrices, in a file of any order, through buffers of any size: every
    parameter is, bit for bit, what torch makes of the stored matrices, and every byte of the plan was placed."""
    with TemporaryDirectory() as folder:
        plan, wanted = planned(Path(folder), stacks, order)
        params = {s.name: nn.Parameter(torch.zeros(s.shape, dtype=getattr(torch, s.dtype)), requires_grad=False) for s in plan.model.params}
        reader = ScratchTransport(folder, torch.device("cpu"), ReaderLimits(2, buffer_bytes, most_gap, 1, 1 << 20))
        moved = reader.deliver(plan, sink(params), NoProgress(), lambda: None)
    assert moved.bytes_placed == plan.bytes_read
    for name, tensor in wanted.items():
        assert torch.equal(params[name].view(torch.uint8), tensor.view(torch.uint8)), name
