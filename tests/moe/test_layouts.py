"""Every layout, every parallel shape: what all ranks hold together is the checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_llm import ParallelConfig
from rtp_llm.plan.boxes import Box
from rtp_llm.plan.coverage import tiles
from tests.moe.stacks import Layout, Sizes, loaded, matrices, planned, save, tensors

LAYOUTS = st.builds(
    Layout,
    fused=st.booleans(),
    stacked=st.sets(st.sampled_from(["gate", "up", "down"])).map(frozenset),
    suffix=st.sampled_from(["", ".weight"]),
)


@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_all_ranks_together_hold_the_checkpoint(tp: int, ep: int, data: st.DataObject) -> None:
    """The boxes of all ranks tile every logical tensor with nothing twice but routers, which every rank has; each rank's
    parameters hold the right elements; no byte is read that is not kept; and all ranks plan alike."""
    sizes = Sizes(
        layers=data.draw(st.integers(1, 2)),
        experts=data.draw(st.integers(ep, 9)),
        intermediate=tp * data.draw(st.integers(1, 3)),
        hidden=data.draw(st.integers(1, 7)),
    )
    layouts = data.draw(st.lists(LAYOUTS, min_size=sizes.layers, max_size=sizes.layers))
    transposed = data.draw(st.booleans())
    whole = matrices(sizes)
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, tensors(whole, layouts, transposed))
        held: dict[str, Counter[Box]] = {}
        digests = set()
        for ep_rank in range(ep):
            for tp_rank in range(tp):
                parallel = ParallelConfig(tp, tp_rank, ep, ep_rank)
                model, plan = planned(folder, sizes, parallel, transposed)
                assert not plan.problems
                found = {(layer, weight): layout.name for (layer, weight), layout in plan.expert_layouts().items()}
                assert found == {(layer, weight): name for layer, layout in enumerate(layouts) for weight, name in layout.names.items()}
                assert plan.bytes_read == plan.bytes_resident
                loaded(folder, model, plan)
                check_rank(model, whole, sizes, parallel)
                digests.add(plan.digest)
                for delivery in plan.deliveries:
                    held.setdefault(delivery.slot, Counter())[delivery.slot_box] += 1
        assert len(digests) == 1
        assert held.keys() == plan.slots.keys()
        for slot, boxes in held.items():
            assert tiles(plan.slots[slot].slot_shape, list(boxes)), slot
            assert set(boxes.values()) == {tp * ep if slot.endswith("router.weight") else 1}, slot


@pytest.mark.parametrize("ep", [1, 2, 4])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_all_ranks_together_hold_every_copy(ep: int, data: st.DataObject) -> None:
    """With a table, ranks hold just the copies that it names, in its order, each of them right; every expert is somewhere."""
    sizes = Sizes(layers=1, experts=data.draw(st.integers(1, 6)), intermediate=2 * data.draw(st.integers(1, 2)), hidden=3)
    least = max(1, -(-sizes.experts // ep))
    copies = data.draw(st.lists(st.integers(0, sizes.experts - 1), min_size=ep * (least + 2), max_size=ep * (least + 2)))
    row = data.draw(st.permutations([*range(sizes.experts), *copies[sizes.experts :]]))
    layout = data.draw(LAYOUTS)
    whole, each = matrices(sizes), len(row) // ep
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, tensors(whole, [layout], False))
        read = 0
        for ep_rank in range(ep):
            mine = row[ep_rank * each : (ep_rank + 1) * each]
            for tp_rank in range(2):
                model, plan = planned(folder, sizes, ParallelConfig(2, tp_rank, ep, ep_rank), table={0: tuple(row)})
                assert not plan.problems
                loaded(folder, model, plan)
                width = sizes.intermediate // 2
                rows = slice(tp_rank * width, (tp_rank + 1) * width)
                gate, up, down = (whole[f"0.{part}"][list(mine)] for part in ("gate", "up", "down"))
                assert torch.equal(model[0].experts.gate_up, torch.cat([gate[:, rows], up[:, rows]], dim=1))
                assert torch.equal(model[0].experts.down, down[:, :, rows])
                read += plan.bytes_read
        # A rank reads each of its experts once, however many copies of it it holds.
        once = sum(len({*row[rank * each : (rank + 1) * each]}) for rank in range(ep))
        assert read == (once * 3 * sizes.intermediate * 3 + 2 * ep * sizes.experts * 3) * 4


def check_rank(model: torch.nn.ModuleList, whole: dict[str, torch.Tensor], sizes: Sizes, parallel: ParallelConfig) -> None:
    """A rank's parameters are what plain indexing makes of the whole matrices."""
    each, more = divmod(sizes.experts, parallel.ep_size)
    first = parallel.ep_rank * each + min(parallel.ep_rank, more)
    mine = slice(first, first + each + (parallel.ep_rank < more))
    width = sizes.intermediate // parallel.tp_size
    rows = slice(parallel.tp_rank * width, (parallel.tp_rank + 1) * width)
    for layer, moe in enumerate(model):
        gate, up, down = (whole[f"{layer}.{part}"][mine] for part in ("gate", "up", "down"))
        assert torch.equal(moe.experts.gate_up, torch.cat([gate[:, rows], up[:, rows]], dim=1))
        assert torch.equal(moe.experts.down, down[:, :, rows])
        assert torch.equal(moe.router.weight, whole[f"{layer}.router"])


def test_stacked_holds_only_if_all_parts_are_stacked(tmp_path: Path) -> None:
    """A stacked gate beside an up for each expert is neither layout; no name with a number left open is looked up."""
    sizes = Sizes(1, 3, 2, 2)
    save(tmp_path, tensors(matrices(sizes), [Layout(False, frozenset({"gate"}))], False))
    _, plan = planned(tmp_path, sizes, ParallelConfig())
    assert {weight: layout.name for (_, weight), layout in plan.expert_layouts().items()} == {"gate_up": "MIXED", "down": "PER_EXPERT"}


def test_orientation_is_declared_and_not_guessed(tmp_path: Path) -> None:
    """Where 2I equals H both orientations have one shape: what the mapping says decides, and gives other elements."""
    sizes = Sizes(1, 2, 2, 4)
    whole = matrices(sizes)
    save(tmp_path, tensors(whole, [Layout(True, frozenset({"down"}))], True))
    right, wrong = (planned(tmp_path, sizes, ParallelConfig(), transposed=transposed) for transposed in (True, False))
    assert not right[1].problems
    loaded(tmp_path, *right)
    assert torch.equal(right[0][0].experts.gate_up, torch.cat([whole["0.gate"], whole["0.up"]], dim=1))
    # down is [E, 2, 4] where it should be [E, 4, 2]: there the shape tells.
    assert [problem.code for problem in wrong[1].problems] == ["SHAPE_MISMATCH"] * 2
    assert "look exchanged" in str(wrong[1].problems[0].fix)
