"""Forms alone: shapes, shards and layouts of stored tensors, and the worked values of the formats."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.config.load import QUANTIZATION_METHODS
from rtp_llm.plan.boxes import extent
from rtp_llm.plan.coverage import tiles
from rtp_llm.quantization import registry
from rtp_llm.quantization.float4 import e2m1
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Matrix, TensorForm, lay, split_units
from rtp_llm.quantization.kernels import ScaledProduct
from rtp_llm.quantization.scheme import broadcast_scales, unpack, values_of


def test_the_setting_names_the_registered_methods() -> None:
    """What the command line allows is what is registered, and every name of a tensor that a method may ask for has a rule."""
    assert {*QUANTIZATION_METHODS} == {*registry.BY_NAME} and len(registry.BY_NAME) == len(registry.METHODS)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 40),
    per=st.integers(1, 9),
    ranks=st.sampled_from([1, 2, 3, 4, 5]),
    axis=st.sampled_from([0, 1]),
)
def test_ranks_hold_each_block_scale_in_equal_or_disjoint_parts(rows: int, columns: int, per: int, ranks: int, axis: int) -> None:
    """However shards cut through blocks: a shard's scales, broadcast, are those of the whole matrix; parts of different ranks are equal
    or disjoint; all together they are the whole tensor; and each rank's parameter is filled exactly once."""
    form = TensorForm("scale", "float32", (Along(ROWS, per, partial=True), Along(COLUMNS, per, partial=True)))
    size = [rows * ranks, columns] if axis == 0 else [rows, columns * ranks]
    shape = (size[0], size[1])
    whole = Matrix("m", shape, (0, shape[0]), (0, shape[1]))
    scales = torch.rand(form.shape(whole))
    wide = broadcast_scales(scales, form, whole)
    assert tuple(wide.shape) == shape
    seen: set[tuple[tuple[int, int], ...]] = set()
    for rank in range(ranks):
        spans = [(0, shape[0]), (0, shape[1])]
        part = shape[axis] // ranks
        spans[axis] = (rank * part, (rank + 1) * part)
        matrix = Matrix("m", shape, spans[0], spans[1])
        laid = lay(form, [matrix])
        assert tiles(laid.shape, [tile.local_box for tile in laid.tiles])
        assert all(extent(tile.slot_box) == extent(tile.local_box) for tile in laid.tiles)
        box = tuple(slice(*dim.span(matrix)) for dim in form.dims)
        assert torch.equal(broadcast_scales(scales[box], form, matrix), wide[slice(*spans[0]), slice(*spans[1])])
        seen |= {tile.slot_box for tile in laid.tiles}
    assert tiles(form.shape(whole), list(seen))


def test_what_may_not_be_cut_is_named() -> None:
    """Packed words and groups must be whole on every rank; scales that an index picks from are whole anyway."""
    words = TensorForm("packed", "int32", (Along(ROWS, 8), Along(COLUMNS)))
    assert list(split_units(words, Matrix("m", (64, 32), (0, 12), (0, 32)))) == [words.dims[0]]
    assert not list(split_units(words, Matrix("m", (64, 32), (8, 16), (5, 7))))
    indexed = TensorForm("scales", "float16", (Along(COLUMNS, 32, whole=True), Along(ROWS)))
    assert not list(split_units(indexed, Matrix("m", (64, 64), (0, 64), (5, 7))))
    assert list(split_units(indexed, Matrix("m", (64, 65), (0, 64), (0, 65)))) == [indexed.dims[0]]


def test_parts_and_experts_stand_where_their_matrices_do() -> None:
    """Fused parts stack along rows, wherever that dimension is; numbers of a part each have an index; experts a leading one."""
    parts = [Matrix(f"e{e}.{one}", (6, 8), (2, 4), (0, 8), e) for e in (0, 1) for one in ("gate", "up")]
    turned = lay(TensorForm("qweight", "int32", (Along(COLUMNS, 4), Along(ROWS))), parts)
    assert turned.shape == (2, 2, 4) and turned.boxes[3] == ((1, 2), (0, 2), (2, 4))
    number = lay(TensorForm("input_scale", "float32", ()), parts)
    assert number.shape == (2, 2) and number.boxes[1] == ((0, 1), (1, 2))
    row = lay(TensorForm("shape", "int64", (Fixed(2),)), parts)
    assert row.shape == (2, 2, 2) and [tile.slot for tile in row.tiles] == ["e0.gate.shape", "e0.up.shape", "e1.gate.shape", "e1.up.shape"]


def test_worked_values() -> None:
    """Published examples of each packing and number: bits to values."""
    word = torch.tensor([0xFEA98710 - 2**32], dtype=torch.int64).int()
    assert (unpack(word, 4) - 8).tolist() == [-8, -7, -1, 0, 1, 2, 6, 7]
    assert unpack(torch.tensor([0x04030201], dtype=torch.int32), 8).tolist() == [1, 2, 3, 4]
    assert e2m1(torch.tensor([0x2B], dtype=torch.uint8)).tolist() == [-1.5, 1.0]
    assert values_of(torch.tensor([126, 130, 0], dtype=torch.uint8)).tolist() == [0.5, 8.0, 2.0**-127]
    assert values_of(torch.tensor([255], dtype=torch.uint8)).isnan().all()
    awq_word = torch.tensor([0x75316420], dtype=torch.int32)
    shifts = torch.tensor((0, 16, 4, 20, 8, 24, 12, 28), dtype=torch.int32)
    assert unpack(awq_word, 4, shifts).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_the_scaled_product_is_that_of_its_codes() -> None:
    """torch's scaled product, which the CPU has as well: for each token, or with one scale for all, what float64 makes of the same
    codes, to bfloat16; a row of zeros stays zero, and the bias is added once."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 64, generator=generator).to(torch.float8_e4m3fn)
    scale, bias = torch.rand(1, 48, generator=generator) + 0.5, torch.randn(48, generator=generator)
    x = torch.randn(2, 5, 64, generator=generator)
    x[0, 0] = 0
    for static in (None, torch.tensor([[0.01]])):
        wide = x.abs().amax(-1, keepdim=True) / 448 if static is None else static
        codes = (x / wide.clamp_min(1e-12)).clamp(-448, 448).to(torch.float8_e4m3fn)
        wanted = (codes.double() * wide.double()) @ (weight.double() * scale.double().t()).t() + bias
        found = ScaledProduct(weight, scale, static)(x, bias)
        assert torch.allclose(found.double(), wanted, rtol=2**-7, atol=2**-7 * wanted.abs().max())
        assert torch.equal(found[0, 0], bias)
