"""``config.json`` of DeepSeek-V3.2; defaults are those of transformers' ``DeepseekV32Config``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rtp_llm.layers.indexer import IndexerShape
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.latent_config import ExpertDefaults, LatentConfig, LatentDefaults, read_latent, read_sparse_layers, sigmoid_config
from rtp_llm.models.reader import MAX_POSITIONS, MAX_SIZE, FieldReader, config_reader

_DEFAULTS = LatentDefaults(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    layers=61,
    heads=128,
    max_position_embeddings=163840,
    norm_eps=1e-6,
)
#: Every layer is of this kind; transformers calls it by the second name since 5.24 and wrote the first one before.
_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
_EXPERTS = ExpertDefaults(experts=256, top_k=8, shared=1, intermediate_size=2048, scale=2.5, groups=8, top_groups=4)


def parse_config(raw: Mapping[str, Any], names: Collection[str]) -> LatentConfig:
    """Every layer has an indexer, which works on the latent of queries; so there must be one.

    Raises:
        ConfigError: with every bad field.
    """
    reader = config_reader(raw)
    reader.only("topk_method", ("noaux_tc",), "that is DeepSeek-V2's")
    reader.only("scoring_func", ("sigmoid",), "that is DeepSeek-V2's")
    if raw.get("q_lora_rank") is None:
        reader.fail("q_lora_rank", "a value, as the indexer works on the latent of queries", fault=ModelFault.ABSENT_FIELD)
    sizes = read_latent(reader, _DEFAULTS, indexer=_read_indexer(reader))
    reader.words("layer_types", sizes.layers, _LAYER_TYPES)
    return sigmoid_config(reader, sizes, names, read_sparse_layers(reader, sizes.layers, 3, listed=True), _EXPERTS)


def _read_indexer(reader: FieldReader) -> IndexerShape:
    heads, dim = reader.integer("index_n_heads", 64), reader.integer("index_head_dim", 128)
    if heads * dim > MAX_SIZE:
        reader.fail("index_n_heads", f"heads of {dim} elements that make up to {MAX_SIZE}", actual=heads)
    turned = reader.raw.get("qk_rope_head_dim", 64)
    if isinstance(turned, int) and turned > dim:
        reader.fail("index_head_dim", f"at least qk_rope_head_dim ({turned}), the elements that are rotated", actual=dim)
    return IndexerShape(heads, dim, reader.integer("index_topk", 2048, most=MAX_POSITIONS))
