"""Layers alone: what ranks hold of each slot, and functions against their definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from rtp_llm.errors import ConfigError, PlanError
from rtp_llm.layers.activation import ACTIVATIONS, activation
from rtp_llm.layers.attention import causal_mask
from rtp_llm.layers.base import Planned, param_specs
from rtp_llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rtp_llm.layers.linear import ColumnParallelLinear, HeadShape, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from rtp_llm.layers.norm import LayerNorm, RMSNorm
from rtp_llm.layers.pooling import pool
from rtp_llm.parallel.groups import TensorParallel
from rtp_llm.plan.boxes import volume
from rtp_llm.plan.coverage import tiles
from rtp_llm.plan.pieces import Piece

F32 = torch.float32


def held(layers: list[Planned]) -> dict[str, list[Piece]]:
    """All ranks' pieces by slot; each rank's tiles fill its parameters."""
    pieces: dict[str, list[Piece]] = {}
    for layer in layers:
        for spec in param_specs(layer):
            assert tiles(spec.shape, [tile.local_box for tile in spec.tiles])
            for tile in spec.tiles:
                if isinstance(tile, Piece):
                    pieces.setdefault(tile.slot, []).append(tile)
    return pieces


def assert_shared_out(pieces: list[Piece], copies: int = 1) -> None:
    """The ranks together hold every element of the slot ``copies`` times."""
    boxes = [piece.slot_box for piece in pieces]
    assert all(boxes.count(box) == copies for box in boxes if volume(box))
    assert tiles(pieces[0].slot_shape, sorted(set(boxes)))


@given(tp=st.integers(1, 4), heads_a_rank=st.integers(1, 3), kv=st.integers(1, 8), bias=st.booleans())
def test_qkv_heads_are_shared_out_or_copied(tp: int, heads_a_rank: int, kv: int, bias: bool) -> None:
    """Query heads are held once; KV heads once, or by as many ranks as there are for each head; biases go with them."""
    if kv % tp and tp % kv:
        return
    layers = [
        QKVParallelLinear("a", 8, HeadShape(heads_a_rank * tp, kv, 4), bias=bias, tp=TensorParallel(tp, rank), dtype=F32)
        for rank in range(tp)
    ]
    pieces = held(list(layers))
    assert set(pieces) == {f"a.{x}.{p}" for x in "qkv" for p in (("weight", "bias") if bias else ("weight",))}
    for slot, all_pieces in pieces.items():
        assert_shared_out(all_pieces, 1 if ".q." in slot else max(1, tp // kv))
    assert {layer.kv_heads for layer in layers} == {max(1, kv // tp)}


@given(tp=st.integers(1, 4), a=st.integers(1, 3), b=st.integers(1, 3), bias=st.booleans())
def test_matrices_are_shared_out(tp: int, a: int, b: int, bias: bool) -> None:
    """Columns and merged columns by rows, biases with them; rows by columns, with the bias whole on each rank."""
    ranks = [TensorParallel(tp, rank) for rank in range(tp)]
    column = held([ColumnParallelLinear("c", 8, a * tp, bias=bias, tp=rank, dtype=F32) for rank in ranks])
    merged = held([MergedColumnParallelLinear(("m.0", "m.1"), 8, (a * tp, b * tp), bias=bias, tp=rank, dtype=F32) for rank in ranks])
    row = held([RowParallelLinear("r", a * tp, 8, bias=bias, tp=rank, dtype=F32) for rank in ranks])
    for pieces in (*column.values(), *merged.values(), row["r.weight"]):
        assert_shared_out(pieces)
    if bias:
        assert_shared_out(row["r.bias"], copies=tp)
    assert ("r.bias" in row) is bias


@given(tp=st.integers(1, 5), vocab=st.integers(1, 400))
def test_vocabularies_are_shared_out(tp: int, vocab: int) -> None:
    """Every row is held once, every rank has as many rows, and each states the table though it may hold none of it."""
    ranks = [TensorParallel(tp, rank) for rank in range(tp)]
    for make in (VocabParallelEmbedding, ParallelLMHead):
        layers = [make("e", vocab, 4, tp=rank, dtype=F32) for rank in ranks]
        pieces = held(list(layers))["e.weight"]
        assert len(pieces) == tp
        assert_shared_out(pieces)
        rows = {layer.weight.shape[0] for layer in layers}
        assert len(rows) == 1 and (tp == 1 or rows.pop() % 64 == 0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str) -> None:
    """The function that the same name has there, on both sides of zero and far out."""
    x = torch.linspace(-30, 30, 1001)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


def test_an_unknown_activation_is_refused() -> None:
    """With the names that are known."""
    with pytest.raises(ConfigError, match=r"UNKNOWN_ACTIVATION.*gelu_new.*'siluu'"):
        activation("siluu")


@pytest.mark.parametrize("tokens", [1, 2, 7])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 50])
def test_causal_masks_are_their_definition(tokens: int, window: int | None) -> None:
    """A token sees itself and those before it, of these the last ``window``; a mask without a tensor means the same."""
    expected = torch.tensor([[k <= q and (window is None or k > q - window) for k in range(tokens)] for q in range(tokens)])
    mask = causal_mask(tokens, window, torch.device("cpu"))
    if mask.tensor is not None:
        assert torch.equal(mask.tensor, expected)
    else:
        assert torch.equal(torch.ones(tokens, tokens).tril().bool(), expected) and mask.causal == (tokens > 1)


def test_rms_norm_rounds_before_it_scales() -> None:
    """The mean is taken in float32, and the weight multiplies a bfloat16 value: transformers' Llama to the last bit."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    generator = torch.Generator().manual_seed(0)
    ours, theirs = RMSNorm("n", 64, 1e-5, dtype=torch.bfloat16), LlamaRMSNorm(64, 1e-5).bfloat16()
    theirs.weight.data.copy_(torch.randn(64, generator=generator))
    ours.weight = theirs.weight
    x = (torch.randn(5, 64, generator=generator) * 3).bfloat16()
    assert torch.equal(ours(x), theirs(x))


def test_layer_norm_has_its_own_epsilon() -> None:
    """A large epsilon shows."""
    norm = LayerNorm("n", 8, 0.5, dtype=F32)
    norm.weight, norm.bias = torch.nn.Parameter(torch.full((8,), 2.0)), torch.nn.Parameter(torch.full((8,), 3.0))
    x = torch.arange(8.0)
    expected = (x - x.mean()) / (x.var(unbiased=False) + 0.5).sqrt() * 2 + 3
    torch.testing.assert_close(norm(x), expected)


def test_poolings_heed_the_mask_on_both_sides() -> None:
    """Padding before or behind is not pooled; an unknown mode is refused with those that are known."""
    hidden = torch.tensor([[[1.0], [2.0], [9.0]], [[9.0], [-4.0], [-6.0]]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    expected = {"mean": [1.5, -5.0], "cls": [1.0, -4.0], "lasttoken": [2.0, -6.0], "max": [2.0, -4.0]}
    for mode, values in expected.items():
        assert pool(hidden, mask, mode).flatten().tolist() == values
    assert pool(hidden, None, "mean").flatten().tolist() == pytest.approx([4.0, -1 / 3])
    with pytest.raises(ConfigError, match=r"UNKNOWN_POOLING.*cls, lasttoken, max, mean"):
        pool(hidden, mask, "average")


def test_a_parameter_that_no_layer_plans_is_a_mistake() -> None:
    """It would stay uninitialised, so planning stops."""
    layer = RMSNorm("n", 4, 1e-6, dtype=F32)
    layer.register_buffer("table", torch.zeros(3))
    with pytest.raises(PlanError, match=r"INTERNAL.*\(tensor 0\.table\)"):
        list(param_specs(torch.nn.Sequential(layer)))
