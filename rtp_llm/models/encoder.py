"""Configuration, mapping and model that BERT-type families share."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import product

import torch

from rtp_llm.layers.activation import ACTIVATIONS
from rtp_llm.layers.attention import Attention, AttentionShape
from rtp_llm.layers.embedding import ReplicatedEmbedding, VocabParallelEmbedding
from rtp_llm.layers.encoder import Encoder, EncoderEmbedding, EncoderLayer
from rtp_llm.layers.linear import ReplicatedLinear
from rtp_llm.layers.mlp import MLP, MLPShape
from rtp_llm.layers.norm import LayerNorm
from rtp_llm.models.reader import MAX_LAYERS, FieldReader
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility
from rtp_llm.plan.rules import Mapping, Rule, Skip


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A BERT-type encoder.  ``padding_id``: the token from which positions are counted (RoBERTa), or None (BERT).

    ``pooler``: whether the checkpoint has one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    act: str
    norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    padding_id: int | None
    pooler: bool


def read_encoder(reader: FieldReader, names: Collection[str], *, vocab_size: int, default_padding_id: int | None) -> EncoderConfig:
    """Reads the fields; problems stay with the reader.  ``default_padding_id`` None: the family does not count from padding."""
    hidden = reader.integer("hidden_size", 768)
    heads = reader.integer("num_attention_heads", 12)
    if hidden % heads and reader.sound("num_attention_heads"):
        reader.fail("hidden_size", f"a multiple of num_attention_heads ({heads})", actual=hidden)
    reader.only("position_embedding_type", ("absolute",), "relative positions are not supported")
    reader.only("is_decoder", (False,), "this family is an encoder")
    reader.only("add_cross_attention", (False,), "this family is an encoder")
    vocab = reader.integer("vocab_size", vocab_size)
    padding = None if default_padding_id is None else reader.integer("pad_token_id", default_padding_id, least=0, most=vocab - 1)
    return EncoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size", 3072),
        layers=reader.integer("num_hidden_layers", 12, most=MAX_LAYERS),
        heads=heads,
        act=reader.choice("hidden_act", "gelu", ACTIVATIONS),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        max_position_embeddings=reader.integer("max_position_embeddings", 512),
        type_vocab_size=reader.integer("type_vocab_size", 2),
        padding_id=padding,
        pooler=any(name.startswith("pooler.") for name in names),
    )


def encoder_conditions(config: EncoderConfig) -> tuple[Divisibility, ...]:
    """Heads and the intermediate size are split over the ranks."""
    return (Divisibility("attention heads", config.heads), Divisibility("elements of intermediate_size", config.intermediate_size))


#: Modules of each layer, under ``encoder.layer.{}.``, and the slots they fill, under ``layers.{}.``.
_LINEARS = {
    "attention.self.query": "attn.q",
    "attention.self.key": "attn.k",
    "attention.self.value": "attn.v",
    "attention.output.dense": "attn.o",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
}
_NORMS = {"attention.output.LayerNorm": "attn_norm", "output.LayerNorm": "mlp_norm"}
_TABLES = {"word_embeddings": "embed", "position_embeddings": "position_embed", "token_type_embeddings": "type_embed"}

#: Names of norms' parameters: today's, and those of files converted from TensorFlow.
_NORM_PARAMETERS = (("weight", "weight"), ("bias", "bias"), ("gamma", "weight"), ("beta", "bias"))
_PARAMETERS = ("weight", "bias")


def encoder_mapping(config: EncoderConfig, heads: Iterable[str]) -> Mapping:
    """``heads``: tensors of heads on top of the encoder, by template, which an embedding model does not run."""
    rules: list[Rule] = [Rule(f"embeddings.{raw}.weight", f"{slot}.weight") for raw, slot in _TABLES.items()]
    rules += [Rule(f"embeddings.LayerNorm.{raw}", f"embed_norm.{slot}") for raw, slot in _NORM_PARAMETERS]
    for (raw, slot), parameter in product(_LINEARS.items(), _PARAMETERS):
        rules.append(Rule(f"encoder.layer.{{}}.{raw}.{parameter}", f"layers.{{}}.{slot}.{parameter}"))
    for (raw, slot), (old, new) in product(_NORMS.items(), _NORM_PARAMETERS):
        rules.append(Rule(f"encoder.layer.{{}}.{raw}.{old}", f"layers.{{}}.{slot}.{new}"))
    if config.pooler:
        rules += [Rule(f"pooler.dense.{parameter}", f"pooler.{parameter}") for parameter in _PARAMETERS]
    skips = [Skip(f"embeddings.{name}", "counts up from 0, computed when needed") for name in ("position_ids", "token_type_ids")]
    skips += [Skip(name, "a training head, which an embedding model does not run") for name in heads]
    return Mapping(tuple(rules), tuple(skips))


def build_encoder(config: EncoderConfig, groups: Groups, dtype: torch.dtype) -> Encoder:
    """The model of one rank, on the meta device."""
    tp, hidden = groups.tp, config.hidden_size
    shape = AttentionShape(hidden, config.heads, config.heads, hidden // config.heads, qkv_bias=True, output_bias=True)

    def norm(slot: str) -> LayerNorm:
        return LayerNorm(slot, hidden, config.norm_eps, dtype=dtype)

    def layer(i: int) -> EncoderLayer:
        attn = Attention(f"layers.{i}.attn", shape, layer=i, tp=tp, dtype=dtype)
        mlp = MLP(f"layers.{i}.mlp", MLPShape(hidden, config.intermediate_size, config.act, bias=True), tp=tp, dtype=dtype)
        return EncoderLayer(attn, mlp, norm(f"layers.{i}.attn_norm"), norm(f"layers.{i}.mlp_norm"))

    embed = EncoderEmbedding(
        VocabParallelEmbedding("embed", config.vocab_size, hidden, tp=tp, dtype=dtype),
        ReplicatedEmbedding("position_embed", config.max_position_embeddings, hidden, dtype=dtype),
        ReplicatedEmbedding("type_embed", config.type_vocab_size, hidden, dtype=dtype),
        norm("embed_norm"),
        config.padding_id,
    )
    pooler = ReplicatedLinear("pooler", hidden, hidden, bias=True, dtype=dtype) if config.pooler else None
    return Encoder(embed, [layer(i) for i in range(config.layers)], pooler)
