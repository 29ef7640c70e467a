"""``config.json`` of Kimi Linear, as published and as transformers' ``KimiLinearConfig`` writes it; the defaults are the latter's."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from rtp_llm.layers.kda import KDAShape
from rtp_llm.models.latent_config import (
    ExpertDefaults,
    ExpertFields,
    LatentConfig,
    LatentDefaults,
    read_latent,
    read_sparse_layers,
    sigmoid_config,
)
from rtp_llm.models.moe import RoutingFields
from rtp_llm.models.reader import MAX_SIZE, FieldReader, config_reader

_DEFAULTS = LatentDefaults(
    vocab_size=163840,
    hidden_size=2304,
    intermediate_size=9216,
    layers=27,
    heads=32,
    max_position_embeddings=1048576,
    norm_eps=1e-5,
)
_EXPERTS = ExpertDefaults(experts=256, top_k=8, shared=1, intermediate_size=1024, scale=2.446)
_FIELDS = ExpertFields(
    experts="num_experts",
    shared="num_shared_experts",
    renormalise="moe_renormalize",
    routing=RoutingFields(top_k="num_experts_per_token", groups="num_expert_group"),
)

#: The largest number of taps of a short convolution; published models have 4.
_MAX_TAPS = 64


@dataclass(frozen=True, slots=True)
class KimiConfig:
    """A decoder whose layers ``linear`` have delta attention, and the others latent attention."""

    latent: LatentConfig
    kda: KDAShape
    linear: frozenset[int]


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> KimiConfig:
    """Raises:
    ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    reader.only("mla_use_nope", (True,), "the family rotates nothing")
    reader.only("moe_router_activation_func", ("sigmoid",), "the family knows no other")
    reader.only("hidden_act", ("silu",), "the short convolutions know no other")
    sizes = read_latent(reader, _DEFAULTS, rotated=False, interleaved=False, length="model_max_length")
    nested = reader.nested("linear_attn_config")
    kda = _read_kda(reader, nested, sizes.hidden_size, sizes.norm_eps)
    linear = _read_linear_layers(reader, nested, sizes.layers)
    sparse = read_sparse_layers(reader, sizes.layers, 1, listed=True)
    return KimiConfig(sigmoid_config(reader, sizes, names, sparse, _EXPERTS, _FIELDS), kda, linear)


def _read_kda(reader: FieldReader, nested: FieldReader | None, hidden_size: int, norm_eps: float) -> KDAShape:
    """Sizes of delta attention, from ``linear_attn_config`` as published, else from transformers' fields."""

    def size(published: str, ours: str, default: int, most: int = MAX_SIZE) -> int:
        if nested is not None and published in nested.raw:
            return nested.integer(published, default, most=most)
        return reader.integer(ours, default, most=most)

    heads, dim = size("num_heads", "linear_num_heads", 32), size("head_dim", "linear_head_dim", 128)
    if heads * dim > MAX_SIZE:
        reader.fail("linear_num_heads", f"heads of {dim} elements that make up to {MAX_SIZE}", actual=heads)
    return KDAShape(hidden_size, heads, dim, size("short_conv_kernel_size", "linear_conv_kernel_dim", 4, _MAX_TAPS), norm_eps)


def _read_linear_layers(reader: FieldReader, nested: FieldReader | None, layers: int) -> frozenset[int]:
    """The layers with delta attention, from 0.  ``layer_types`` comes before ``linear_attn_config``, which counts from 1.  By
    default every fourth layer but the first has full attention, as in transformers."""
    types = reader.words("layer_types", layers, ("full_attention", "linear_attention"))
    if types is not None:
        return frozenset(i for i, kind in enumerate(types) if kind == "linear_attention")
    if nested is None or not {"kda_layers", "full_attn_layers"} <= nested.raw.keys():
        return frozenset(i for i in range(layers) if i == 0 or i % 4)
    linear, full = (nested.raw[name] for name in ("kda_layers", "full_attn_layers"))
    whole = all(isinstance(part, list) and all(type(i) is int for i in part) for part in (linear, full))
    if not whole or sorted([*linear, *full]) != list(range(1, layers + 1)):
        nested.fail("kda_layers", f"with full_attn_layers each of the layers 1 to {layers}, once")
        return frozenset()
    return frozenset(i - 1 for i in linear)
