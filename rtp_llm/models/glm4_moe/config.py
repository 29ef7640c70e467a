"""``config.json`` of GLM-4-MoE; defaults are those of transformers' ``Glm4MoeConfig``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rtp_llm.layers.moe import MoEShape
from rtp_llm.models.decoder import DecoderDefaults, read_decoder, read_tied
from rtp_llm.models.moe import MoEConfig, MoEDecoderConfig, RoutingDefaults, defaulted, read_expert_count, read_routing
from rtp_llm.models.reader import MAX_LAYERS, MAX_SIZE, config_reader

_DEFAULTS = DecoderDefaults(vocab_size=151552, intermediate_size=10944, max_position_embeddings=131072, kv_heads=8, partial_rotary=True)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> MoEDecoderConfig:
    """The first ``first_k_dense_replace`` layers are dense; half of each head is rotated unless the file says otherwise;
    ``use_qk_norm`` asks for RMS norms on query and key heads.

    Raises:
        ConfigError: with every bad field.
    """
    defaults = {"num_hidden_layers": 46, "num_attention_heads": 96, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    reader = config_reader(defaulted(raw, **defaults))
    sizes = read_decoder(reader, _DEFAULTS)
    layers = tuple(range(reader.integer("first_k_dense_replace", 1, least=0, most=MAX_LAYERS), sizes.layers))
    experts = read_expert_count(reader, "n_routed_experts", 128, len(layers))
    renormalise = reader.boolean("norm_topk_prob", True)
    routing = read_routing(reader, experts, RoutingDefaults("noaux_tc", top_k=8, scale=1.0, renormalise=renormalise, wide=True))
    width = reader.integer("moe_intermediate_size", 1408)
    shared = reader.integer("n_shared_experts", 1, most=max(1, MAX_SIZE // width))
    decoder = replace(
        sizes,
        tied=read_tied(reader, names),
        qkv_bias=reader.boolean("attention_bias", False),
        head_norms=reader.boolean("use_qk_norm", False),
    )
    # transformers 5 knows the field under both names.
    mtp = reader.integer("num_nextn_predict_layers" if "num_nextn_predict_layers" in raw else "num_mtp_layers", 1, least=0, most=MAX_LAYERS)
    shape = MoEShape(sizes.hidden_size, width, sizes.act, routing, shared_size=shared * width)
    reader.finish()
    return MoEDecoderConfig(decoder, MoEConfig(shape, layers), mtp)
