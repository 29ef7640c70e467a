"""Configuration that families with multi-head latent attention share; a family's files have the differences."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import count

from rtp_llm.layers.activation import ACTIVATIONS
from rtp_llm.layers.indexer import IndexerShape
from rtp_llm.layers.mla import MLAShape, softmax_scale
from rtp_llm.layers.moe import MoEShape
from rtp_llm.layers.rotary import RopeParameters
from rtp_llm.models.decoder import read_tied
from rtp_llm.models.moe import MoEConfig, RoutingDefaults, RoutingFields, RoutingMethod, read_expert_count, read_routing
from rtp_llm.models.reader import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, FieldReader
from rtp_llm.models.rope import read_rope


@dataclass(frozen=True, slots=True)
class LatentDefaults:
    """A family's defaults for fields absent from ``config.json``: those of its transformers class."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    max_position_embeddings: int
    norm_eps: float
    nope_dim: int = 128
    value_dim: int = 128


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """The checked fields of every such family.  ``rope`` is None if nothing is rotated."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    act: str
    norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters | None
    attention: MLAShape


def read_latent(
    reader: FieldReader,
    defaults: LatentDefaults,
    *,
    rotated: bool = True,
    interleaved: bool = True,
    indexer: IndexerShape | None = None,
    length: str = "max_position_embeddings",
) -> LatentSizes:
    """Reads the common fields; problems stay with the reader.

    ``q_lora_rank`` absent or null: queries have no latent.  ``rotated``: a part of each head is rotated.
    ``interleaved`` and ``indexer``: see :class:`MLAShape`.  ``length``: the name of the field for the context's length.
    """
    heads = reader.integer("num_attention_heads", defaults.heads)
    keys = reader.optional_integer("num_key_value_heads")
    if keys not in (None, heads):
        reader.fail("num_key_value_heads", f"num_attention_heads ({heads}), as every head has a key of its own", actual=keys)
    nope = reader.integer("qk_nope_head_dim", defaults.nope_dim)
    turned = reader.integer("qk_rope_head_dim", 64)
    value = reader.integer("v_head_dim", defaults.value_dim)
    widest = nope + max(turned, value)
    if heads * widest > MAX_SIZE:
        reader.fail("num_attention_heads", f"heads of {widest} elements that make up to {MAX_SIZE}", actual=heads)
    longest = reader.integer(length, defaults.max_position_embeddings, most=MAX_POSITIONS)
    if rotated and turned % 2:
        reader.fail("qk_rope_head_dim", "an even number of rotated elements", actual=turned)
    rope = read_rope(reader, turned + turned % 2, longest) if rotated else None
    hidden = reader.integer("hidden_size", defaults.hidden_size)
    attention = MLAShape(
        hidden_size=hidden,
        heads=heads,
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.integer("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=value,
        scale=softmax_scale(nope + turned, rope),
        interleaved=interleaved,
        rotated=rotated,
        bias=reader.boolean("attention_bias", False),
        indexer=indexer,
    )
    return LatentSizes(
        vocab_size=reader.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", defaults.intermediate_size),
        layers=reader.integer("num_hidden_layers", defaults.layers, most=MAX_LAYERS),
        act=reader.choice("hidden_act", "silu", ACTIVATIONS),
        norm_eps=reader.number("rms_norm_eps", defaults.norm_eps),
        max_position_embeddings=longest,
        rope=rope,
        attention=attention,
    )


@dataclass(frozen=True, slots=True)
class ExpertFields:
    """Names of fields of experts in ``config.json`` that differ between families."""

    experts: str = "n_routed_experts"
    shared: str = "n_shared_experts"
    renormalise: str = "norm_topk_prob"
    routing: RoutingFields = RoutingFields()


@dataclass(frozen=True, slots=True)
class ExpertDefaults:
    """A family's defaults for absent fields of experts: those of its transformers class."""

    experts: int
    top_k: int
    shared: int
    intermediate_size: int
    scale: float
    groups: int = 1
    top_groups: int = 1


def read_experts(
    reader: FieldReader,
    sizes: LatentSizes,
    layers: tuple[int, ...],
    method: RoutingMethod,
    defaults: ExpertDefaults,
    fields: ExpertFields = ExpertFields(),
) -> MoEConfig:
    """The experts of the layers numbered ``layers``; problems stay with the reader.  Only ``noaux_tc`` may renormalise."""
    experts = read_expert_count(reader, fields.experts, defaults.experts, len(layers))
    routing_defaults = RoutingDefaults(
        method,
        defaults.top_k,
        defaults.groups,
        defaults.top_groups,
        defaults.scale,
        renormalise=method == "noaux_tc" and reader.boolean(fields.renormalise, True),
        wide=True,
    )
    routing = read_routing(reader, experts, routing_defaults, fields.routing)
    size = reader.integer("moe_intermediate_size", defaults.intermediate_size)
    shared = reader.optional_integer(fields.shared, defaults.shared, least=0, most=max(1, MAX_SIZE // size)) or 0
    return MoEConfig(MoEShape(sizes.hidden_size, size, sizes.act, routing, shared * size or None), layers)


def read_sparse_layers(reader: FieldReader, layers: int, dense: int, *, listed: bool = False) -> tuple[int, ...]:
    """The layers with experts: from ``first_k_dense_replace`` (default ``dense``) on, those divisible by ``moe_layer_freq``.

    ``listed``: the family may name them in ``mlp_layer_types`` instead.
    """
    types = reader.words("mlp_layer_types", layers, ("dense", "sparse")) if listed else None
    first = reader.integer("first_k_dense_replace", dense, least=0)
    every = reader.integer("moe_layer_freq", 1)
    if types is not None:
        return tuple(i for i, kind in enumerate(types) if kind == "sparse")
    return tuple(i for i in range(layers) if i >= first and i % every == 0)


def count_mtp_layers(layers: int, names: Collection[str]) -> int:
    """The number of layers after the last one for multi-token prediction: each has an ``eh_proj`` in the checkpoint.

    Other layers after the last one stay unexpected, so a ``num_hidden_layers`` that is too small is noticed.
    """
    return next(n for n in count() if f"layers.{layers + n}.eh_proj.weight" not in names)


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """A decoder with latent attention, dense or with experts layer by layer.

    ``mtp_layers``: layers after the last one for multi-token prediction, which are not loaded.  ``tied``: the head has the
    embedding's weight.  ``wide_rotary``: the rotation is computed in float32, whatever the model's dtype.
    """

    sizes: LatentSizes
    moe: MoEConfig
    mtp_layers: int
    tied: bool
    wide_rotary: bool = False


def latent_config(
    reader: FieldReader, sizes: LatentSizes, moe: MoEConfig, names: Collection[str], *, wide_rotary: bool = False
) -> LatentConfig:
    """The configuration of common fields and a family's own.

    Raises:
        ConfigError: with every bad field that the reader has found.
    """
    config = LatentConfig(sizes, moe, count_mtp_layers(sizes.layers, names), read_tied(reader, names), wide_rotary)
    reader.finish()
    return config


def sigmoid_config(
    reader: FieldReader,
    sizes: LatentSizes,
    names: Collection[str],
    layers: tuple[int, ...],
    experts: ExpertDefaults,
    fields: ExpertFields = ExpertFields(),
) -> LatentConfig:
    """:func:`latent_config` of a family that chooses experts as DeepSeek-V3 does (``noaux_tc``), in the layers ``layers``."""
    return latent_config(reader, sizes, read_experts(reader, sizes, layers, "noaux_tc", experts, fields), names)
