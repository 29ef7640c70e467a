"""Whatever config.json says, families with latent attention read it or refuse it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rtp_llm.errors import ConfigError
from rtp_llm.layers.base import param_specs
from rtp_llm.models.registry import FAMILIES
from rtp_llm.parallel.groups import Groups
from rtp_llm.plan.coverage import tiles
from tests.models.latents import FAMILIES as LATENT

IMPLEMENTATIONS = {family.name: family.load() for family in FAMILIES if family.name in LATENT}

#: What a family cannot do without, so that odd values of other fields are what is looked at.
NEEDED: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 2}, "deepseek_v32": {"q_lora_rank": 64}}
OWN = ["first_k_dense_replace", "moe_layer_freq", "mlp_layer_types", "layer_types", "rope_scaling", "scoring_func", "topk_method"]
NESTED = ["kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size", "rope_type", "factor", "mscale_all_dim"]

WORDS = st.sampled_from(["yarn", "default", "dense", "sparse", "linear_attention", "full_attention", "noaux_tc", "group_limited_greedy"])
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(0, 64) | st.floats() | st.text(max_size=5) | WORDS
LISTS = st.lists(st.integers(-1, 3) | WORDS, max_size=3)
VALUES = SCALARS | LISTS | st.dictionaries(st.sampled_from(NESTED), SCALARS | LISTS)


def fields(family: str) -> list[str]:
    """Names that mean something to a family: those that transformers writes and those that are published."""
    return sorted({*LATENT[family][0]().to_dict(), *OWN, "linear_attn_config", "mla_use_nope", "moe_router_activation_func"})


@pytest.mark.parametrize("family", LATENT)
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_no_configuration_crashes_the_reader(family: str, data: st.DataObject) -> None:
    """A configuration is refused with a ConfigError, or its model stands on the meta device with every parameter tiled."""
    raw = data.draw(st.dictionaries(st.sampled_from(fields(family)), VALUES, max_size=5))
    implementation = IMPLEMENTATIONS[family]
    small = {"num_hidden_layers": 2, "n_routed_experts": 8, "num_experts": 8, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
    try:
        config = implementation.parse_config({**small, "num_experts_per_token": 2, **NEEDED.get(family, {}), **raw}, ())
    except ConfigError as error:
        assert all(problem.what.startswith("field ") for problem in error.problems)
        return
    assert implementation.conditions(config)
    mapping = implementation.mapping(config, ())
    for spec in param_specs(implementation.build(config, Groups(), torch.bfloat16)):
        assert tiles(spec.shape, [tile.local_box for tile in spec.tiles])
        assert all(mapping.raw_names(tile.slot) for tile in spec.tiles)
