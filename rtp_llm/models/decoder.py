"""Configuration, conditions and model that decoder families share; a family's files have the differences."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from rtp_llm.layers.activation import ACTIVATIONS
from rtp_llm.layers.attention import Attention, AttentionShape
from rtp_llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rtp_llm.layers.mlp import GatedMLP, MLPShape
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import RopeParameters, Rotary
from rtp_llm.layers.transformer import CausalLM, DecoderLayer
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.reader import MAX_LAYERS, MAX_POSITIONS, MAX_SIZE, FieldReader
from rtp_llm.models.rope import read_rope
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A dense decoder.  ``windows`` has one entry a layer: how many tokens a token sees, itself included; None for all.

    ``tied``: the head has the embedding's weight.  ``norm_eps``: of all norms, also those of heads.  ``sinks``: every head has one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    act: str
    norm_eps: float
    max_position_embeddings: int
    rope: RopeParameters
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    sinks: bool = False

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.windows)

    @property
    def attention(self) -> AttentionShape:
        """Sizes of every attention block."""
        return AttentionShape(
            self.hidden_size,
            self.heads,
            self.kv_heads,
            self.head_dim,
            qkv_bias=self.qkv_bias,
            output_bias=self.output_bias,
            norm_eps=self.norm_eps if self.head_norms else None,
            rotary_dim=self.rope.dim,
            sinks=self.sinks,
        )

    @property
    def mlp(self) -> MLPShape:
        """Sizes of every dense feed-forward block."""
        return MLPShape(self.hidden_size, self.intermediate_size, self.act, self.mlp_bias)


@dataclass(frozen=True, slots=True)
class DecoderDefaults:
    """A family's defaults for absent fields: those of its transformers class.  Other fields have the same in all families."""

    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    kv_heads: int | None = None
    head_dim: int | None = None
    #: Whether ``"head_dim": null`` means ``hidden_size / num_attention_heads``.
    head_dim_may_be_null: bool = True
    #: Whether ``partial_rotary_factor`` may ask for a part of each head.
    partial_rotary: bool = False


def read_decoder(reader: FieldReader, defaults: DecoderDefaults) -> DecoderConfig:
    """Reads and checks the fields that every decoder family has; problems stay with the reader.

    The rest is as in the simplest family: no windows, an untied head, no biases.  A family replaces what differs.
    """
    hidden = reader.integer("hidden_size", 4096)
    heads = reader.integer("num_attention_heads", 32)
    kv_heads = reader.optional_integer("num_key_value_heads", defaults.kv_heads) or heads
    if heads % kv_heads and reader.sound("num_attention_heads"):
        reader.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})", actual=kv_heads)
    head_dim = _read_head_dim(reader, defaults, hidden, heads)
    longest = reader.integer("max_position_embeddings", defaults.max_position_embeddings, most=MAX_POSITIONS)
    return DecoderConfig(
        vocab_size=reader.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", defaults.intermediate_size),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        act=reader.choice("hidden_act", "silu", ACTIVATIONS),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=longest,
        rope=read_rope(reader, head_dim, longest, partial=defaults.partial_rotary),
        windows=(None,) * reader.integer("num_hidden_layers", 32, most=MAX_LAYERS),
        tied=False,
    )


def _read_head_dim(reader: FieldReader, defaults: DecoderDefaults, hidden: int, heads: int) -> int:
    if defaults.head_dim_may_be_null:
        given = reader.optional_integer("head_dim", defaults.head_dim)
    else:
        given = reader.integer("head_dim", defaults.head_dim or 1)
    if given is None:
        if hidden % heads and reader.sound("num_attention_heads"):
            reader.fail("hidden_size", f"a multiple of num_attention_heads ({heads}) where there is no head_dim", actual=hidden)
        return max(hidden // heads, 2)
    if given * heads > MAX_SIZE:
        reader.fail("head_dim", f"head_dim * num_attention_heads up to {MAX_SIZE}", actual=f"{given} * {heads}")
    return given


def read_tied(reader: FieldReader, names: Collection[str]) -> bool:
    """Whether the head is tied: the configuration says so, and the checkpoint has no head.

    A head in the checkpoint is loaded, whatever the configuration says.  Without either, the head is missing.
    """
    flag = reader.boolean("tie_word_embeddings", False)
    return flag and not any(name.startswith("lm_head.") for name in names)


def read_layer_windows(reader: FieldReader, layers: int) -> tuple[int | None, ...]:
    """Windows as Qwen2 and Qwen3 write them: ``use_sliding_window``, ``sliding_window`` and either ``layer_types`` or
    ``max_window_layers``, the number of first layers without a window."""
    window = reader.optional_integer("sliding_window", 4096, most=MAX_POSITIONS)
    if not reader.boolean("use_sliding_window", False):
        window = None
    types = reader.words("layer_types", layers, ("full_attention", "sliding_attention"))
    if types is None:
        first = reader.integer("max_window_layers", 28, least=0)
        return tuple(window if i >= first else None for i in range(layers))
    if window is None and "sliding_attention" in types:
        reader.fail(
            "layer_types", "full_attention alone, as use_sliding_window is not set", fault=ModelFault.BAD_FIELD, actual="sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def decoder_conditions(config: DecoderConfig) -> tuple[Divisibility, ...]:
    """Heads and the intermediate size are split over the ranks; KV heads may be shared by several."""
    return (
        Divisibility("attention heads", config.heads),
        Divisibility("key/value heads", config.kv_heads, replicated=True),
        Divisibility("elements of intermediate_size", config.intermediate_size),
    )


def build_decoder(
    config: DecoderConfig,
    groups: Groups,
    dtype: torch.dtype,
    *,
    attention: Callable[[int], nn.Module] | None = None,
    mlp: Callable[[int], nn.Module] | None = None,
) -> CausalLM:
    """The model of one rank, on the meta device.

    ``attention`` and ``mlp`` build the blocks of a layer, by its number, for families with others than grouped-query attention
    and a dense gated MLP.
    """
    tp = groups.tp

    def dense_attention(layer: int) -> nn.Module:
        return Attention(f"layers.{layer}.attn", config.attention, layer=layer, window=config.windows[layer], tp=tp, dtype=dtype)

    def dense_mlp(layer: int) -> nn.Module:
        return GatedMLP(f"layers.{layer}.mlp", config.mlp, tp=tp, dtype=dtype)

    def norm(slot: str) -> RMSNorm:
        return RMSNorm(slot, config.hidden_size, config.norm_eps, dtype=dtype)

    layers = [
        DecoderLayer(
            (attention or dense_attention)(i),
            (mlp or dense_mlp)(i),
            norm(f"layers.{i}.input_norm"),
            norm(f"layers.{i}.post_attention_norm"),
        )
        for i in range(config.layers)
    ]
    embed = VocabParallelEmbedding("embed", config.vocab_size, config.hidden_size, tp=tp, dtype=dtype)
    head = None if config.tied else ParallelLMHead("lm_head", config.vocab_size, config.hidden_size, tp=tp, dtype=dtype)
    return CausalLM(embed, layers, norm("norm"), head, Rotary(config.rope))
