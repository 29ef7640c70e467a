"""Rotary tables are those of transformers, kind by kind and on both sides of every threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rtp_llm.kernels.torch_kernels import apply_rotary
from rtp_llm.layers.rotary import ROPE_KINDS, RopeParameters, Rotary

PLAIN = RopeParameters("default", 10_000.0, dim=64, max_position_embeddings=4096, original_max_position_embeddings=512)

SHORT = tuple(1 + i / 32 for i in range(32))
LONG = tuple(1 + i / 4 for i in range(32))
VARIANTS = {
    "default": PLAIN,
    "linear": replace(PLAIN, rope_type="linear", factor=3.0),
    "dynamic": replace(PLAIN, rope_type="dynamic", factor=3.0),
    "yarn": replace(PLAIN, rope_type="yarn", factor=8.0),
    "yarn-by-lengths": replace(PLAIN, rope_type="yarn"),
    "yarn-attention-factor": replace(PLAIN, rope_type="yarn", factor=8.0, attention_factor=1.5),
    "yarn-mscale": replace(PLAIN, rope_type="yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.7),
    "yarn-betas-untruncated": replace(PLAIN, rope_type="yarn", factor=8.0, beta_fast=20.0, beta_slow=2.0, truncate=False),
    "yarn-narrow": replace(PLAIN, rope_type="yarn", factor=8.0, beta_fast=1.0, beta_slow=1.0, truncate=False),
    "longrope": replace(PLAIN, rope_type="longrope", factor=8.0, short_factor=SHORT, long_factor=LONG),
    "longrope-by-lengths": replace(PLAIN, rope_type="longrope", short_factor=SHORT, long_factor=LONG),
    "longrope-attention-factor": replace(PLAIN, rope_type="longrope", short_factor=SHORT, long_factor=LONG, attention_factor=1.2),
    "llama3": replace(PLAIN, rope_type="llama3", factor=8.0),
    "proportional": replace(PLAIN, rope_type="proportional", partial_rotary_factor=0.3, factor=2.0),
}
FIELDS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "short_factor")
FIELDS += ("long_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor", "original_max_position_embeddings", "rope_theta")


def reference(p: RopeParameters) -> LlamaRotaryEmbedding:
    fields = {name: list(value) if isinstance(value, tuple) else value for name in FIELDS if (value := getattr(p, name)) not in (None, ())}
    if p.rope_type == "yarn" and p.factor is None:
        fields["factor"] = None
    config = LlamaConfig(
        hidden_size=p.dim * 2,
        num_attention_heads=2,
        max_position_embeddings=p.max_position_embeddings,
        rope_parameters={"rope_type": p.rope_type, **fields},
    )
    return LlamaRotaryEmbedding(config)


def test_every_kind_that_transformers_knows_is_there() -> None:
    """A kind that a later transformers adds fails here, and each is in the variants below."""
    assert set(ROPE_KINDS) == {"default", *ROPE_INIT_FUNCTIONS}
    assert {p.rope_type for p in VARIANTS.values()} == set(ROPE_KINDS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 512, 513, 4096, 4500])
def test_tables_are_those_of_transformers(variant: str, length: int) -> None:
    """The last positions of sequences below, at and beyond the original and the configured length."""
    p = VARIANTS[variant]
    positions = torch.arange(length)[None]
    theirs = reference(p)(torch.zeros(1), positions)
    ours = Rotary(p).tables(0, length, dtype=torch.float32, device=torch.device("cpu"))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[-8:], expected[0, -8:], rtol=0, atol=2e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_part_of_the_positions_is_a_part_of_the_table(variant: str) -> None:
    """Decoding asks for single positions; they are rows of the whole table, also after other lengths were asked for."""
    rotary = Rotary(VARIANTS[variant])
    cpu = torch.device("cpu")
    rotary.tables(0, 5000, dtype=torch.float32, device=cpu)
    whole = rotary.tables(0, 600, dtype=torch.float32, device=cpu)
    for part, all_rows in zip(rotary.tables(599, 600, dtype=torch.float32, device=cpu), whole, strict=True):
        assert torch.equal(part, all_rows[599:])


def test_rotation_is_that_of_transformers() -> None:
    """Pairs lie half a head apart."""
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = Rotary(PLAIN).tables(3, 8, dtype=torch.float32, device=torch.device("cpu"))
    expected, _ = apply_rotary_pos_emb(x, x, cos[None], sin[None])
    assert torch.equal(apply_rotary(x, cos, sin), expected)


def test_the_rest_of_a_head_passes() -> None:
    """With tables narrower than the head, only the first elements turn."""
    x = torch.randn(1, 1, 5, 96, generator=torch.Generator().manual_seed(0))
    cos, sin = Rotary(PLAIN).tables(0, 5, dtype=torch.float32, device=torch.device("cpu"))
    turned = apply_rotary(x, cos, sin)
    assert torch.equal(turned[..., 64:], x[..., 64:])
    assert torch.equal(turned[..., :64], apply_rotary(x[..., :64], cos, sin))
