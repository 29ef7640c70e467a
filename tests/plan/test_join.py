"""The join proves completeness: everything missing, unexpected, doubled or misshapen is named, all at once."""

from __future__ import annotations

import dataclasses

import pytest

from rtp_llm.checkpoint.catalog import Catalog, FileInfo, TensorInfo
from rtp_llm.errors import PlanError
from rtp_llm.plan.boxes import whole
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Cut
from rtp_llm.plan.pieces import Fill, ParamSpec, Piece
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.plan.rules import Mapping, Rule, Skip, template
from tests.support.plans import joined


def catalog(**shapes: tuple[int, ...]) -> Catalog:
    at, tensors = 100, []
    for name, shape in shapes.items():
        size = 2 * _count(shape)
        tensors.append(TensorInfo(name.replace("_", "."), "BF16", shape, "model.safetensors", at, at + size))
        at += size
    infos = tuple(sorted(tensors, key=lambda t: t.name))
    return Catalog("/anywhere", (FileInfo("model.safetensors", "safetensors", at),), infos, (), ())


def _count(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n


MAPPING = Mapping(
    (Rule("l.{}.q", "layers.{}.q"), Rule("l.{}.k", "layers.{}.k"), Rule("l.{}.old", "layers.{}.q")), (Skip("freq", "computed"),)
)


def fused(rows: int = 6) -> ParamSpec:
    tiles = (
        Piece("layers.0.q", (4, 3), ((0, 4), (0, 3)), ((0, 4), (0, 3))),
        Piece("layers.0.k", (2, 3), ((0, 2), (0, 3)), ((4, 6), (0, 3))),
    )
    pad = (Fill(((6, rows), (0, 3))),) if rows > 6 else ()
    return ParamSpec("layers.0.qk", (rows, 3), "bfloat16", tiles + pad)


def plan_of(files: Catalog, *params: ParamSpec, mapping: Mapping = MAPPING) -> LoadPlan:
    return joined(files, mapping, params, "bfloat16")


def faults(plan: LoadPlan) -> list[tuple[str, str | None]]:
    return [(p.code, p.tensor) for p in plan.problems]


def test_a_fitting_checkpoint() -> None:
    """Sizes and reads of a plan are those of its pieces; the padding is resident and not read."""
    plan = plan_of(catalog(l_0_q=(4, 3), l_0_k=(2, 3), freq=(5,)), fused(rows=8))
    assert not plan.problems
    assert (plan.bytes_resident, plan.bytes_read) == (48, 36)
    assert [(s.raw, s.reason) for s in plan.skipped] == [("freq", "computed")]
    assert [name for name, _ in plan.fills] == ["layers.0.qk"]


def test_everything_wrong_is_listed_at_once() -> None:
    """A missing, an unexpected (unknown name), a surplus (a layer that the model does not have) and a misshapen tensor."""
    plan = plan_of(catalog(l_0_q=(4, 5), l_7_k=(2, 3), stranger=(1,)), fused())
    assert faults(plan) == [
        ("MISSING_TENSOR", "l.0.k"),
        ("SHAPE_MISMATCH", "l.0.q"),
        ("UNEXPECTED_TENSOR", "l.7.k"),
        ("UNEXPECTED_TENSOR", "stranger"),
    ]
    assert plan.missing == ("l.0.k",) and plan.unexpected == ("l.7.k", "stranger")
    with pytest.raises(PlanError, match=r"4 problems[\s\S]*expected \[4, 3\], found \[4, 5\]"):
        plan.raise_for_problems()


def test_two_spellings_of_one_tensor() -> None:
    """Both the old and the new name of a tensor in one checkpoint: refused, whichever would have won."""
    plan = plan_of(catalog(l_0_q=(4, 3), l_0_k=(2, 3), l_0_old=(4, 3)), fused())
    assert [p.fault for p in plan.problems] == [PlanFault.DOUBLED_TENSOR]
    assert "l.0.old" in str(plan.problems[0]) and "l.0.q" in str(plan.problems[0])


def test_quantised_codes_are_never_cast() -> None:
    """An 8-bit tensor in a place for bfloat16 is refused, naming both dtypes; floats are cast."""
    files = catalog(l_0_q=(4, 3), l_0_k=(2, 3))
    for dtype, fits in (("F8_E4M3", False), ("U8", False), ("I64", False), ("F32", True), ("F16", True)):
        tensors = tuple(dataclasses.replace(t, dtype=dtype) if t.name == "l.0.q" else t for t in files.tensors)
        plan = plan_of(dataclasses.replace(files, tensors=tensors), fused())
        assert [p.code for p in plan.problems] == ([] if fits else ["DTYPE_MISMATCH"])


def test_a_source_that_is_used_in_part() -> None:
    """Coverage is proven on the checkpoint's side as well: a row of a tensor that goes nowhere is an error."""
    mapping = Mapping((Rule("l.{}.qk", "layers.{}.q", (Cut(0, 4),)), Rule("l.{}.k", "layers.{}.k")))
    plan = plan_of(catalog(l_0_qk=(7, 3), l_0_k=(2, 3)), fused(), mapping=mapping)
    assert [p.code for p in plan.problems] == ["SOURCE_UNCOVERED"]


@pytest.mark.parametrize("tiles", [((0, 4), (5, 6)), ((0, 4), (3, 6)), ((0, 4), (4, 5))])
def test_a_layer_that_does_not_tile_its_parameter_is_our_mistake(tiles: tuple[tuple[int, int], ...]) -> None:
    """Gaps, overlaps and short tilings of a parameter are refused before anything is planned, by name, as a defect to report."""
    pieces = tuple(
        Piece(f"layers.0.{k}", (b - a, 3), ((0, b - a), (0, 3)), ((a, b), (0, 3))) for k, (a, b) in zip("qk", tiles, strict=True)
    )
    with pytest.raises(PlanError, match=r"INTERNAL.*exactly once \(tensor p\).*please report"):
        plan_of(catalog(l_0_q=(4, 3), l_0_k=(2, 3)), ParamSpec("p", (6, 3), "bfloat16", pieces))


def test_layers_that_contradict_each_other_are_our_mistake() -> None:
    """One slot, and two shapes: whichever was right, the other layer's weights would be wrong."""
    specs = [
        ParamSpec(name, shape, "bfloat16", (Piece("layers.0.q", shape, whole(shape), whole(shape)),))
        for name, shape in {"p": (4, 3), "r": (3, 4)}.items()
    ]
    with pytest.raises(PlanError, match=r"INTERNAL.*different shapes of it \(tensor layers\.0\.q\)"):
        plan_of(catalog(l_0_q=(4, 3)), *specs)


def test_a_piece_that_changes_shape_is_our_mistake() -> None:
    """A box of a slot fills a place of its own shape."""
    piece = Piece("layers.0.q", (4, 3), whole((4, 3)), whole((3, 4)))
    with pytest.raises(PlanError, match=r"INTERNAL.*changes shape.*\(tensor p\)"):
        plan_of(catalog(l_0_q=(4, 3)), ParamSpec("p", (3, 4), "bfloat16", (piece,)))


def test_a_mapping_with_two_rules_for_one_tensor_is_our_mistake() -> None:
    """Rules, skips and refusals are looked up by template: a second one would hide the first."""
    with pytest.raises(PlanError, match=r"INTERNAL.*two rules for it \(tensor l\.\{\}\.q\)"):
        Mapping((Rule("l.{}.q", "layers.{}.q"),), (Skip("l.{}.q", "not needed"),))


def test_one_read_serves_all_who_want_it() -> None:
    """Two parameters that want the same box share one delivery, so its bytes are read once."""
    spec = ParamSpec("a", (4, 3), "bfloat16", (Piece.full("layers.0.q", (4, 3)),))
    plan = plan_of(catalog(l_0_q=(4, 3)), spec, dataclasses.replace(spec, name="b"))
    assert len(plan.deliveries) == 1 and len(plan.deliveries[0].targets) == 2
    assert (plan.bytes_read, plan.bytes_resident) == (24, 48)


def test_digest() -> None:
    """The digest is the same for another directory, and another for another tensor, dtype, size or rule."""
    files = catalog(l_0_q=(4, 3), l_0_k=(2, 3))
    same = plan_of(dataclasses.replace(files, directory="/elsewhere"), fused()).digest
    assert plan_of(files, fused()).digest == same
    moved = tuple(dataclasses.replace(t, start=t.start + 8, stop=t.stop + 8) for t in files.tensors)
    f32 = tuple(dataclasses.replace(t, dtype="F16") for t in files.tensors)
    others = [plan_of(dataclasses.replace(files, tensors=t), fused()).digest for t in (moved, f32)]
    assert len({same, *others}) == 3


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.3.b", ("a.{}.b", (3,))),
        ("3.b", ("{}.b", (3,))),
        ("a.10", ("a.{}", (10,))),
        ("a3.b", ("a3.b", ())),
        ("a.1.2.b", ("a.{}.{}.b", (1, 2))),
    ],
)
def test_template(name: str, expected: tuple[str, tuple[int, ...]]) -> None:
    """Only whole dotted parts are numbers, wherever they stand."""
    assert template(name) == expected
