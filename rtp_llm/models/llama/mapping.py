"""Hugging Face's tensor names of Llama and of the families that descend from it."""

from __future__ import annotations

from collections.abc import Iterator

from rtp_llm.models.decoder import DecoderConfig
from rtp_llm.plan.rules import Mapping, Rule, Skip

_RECOMPUTED = "rotary frequencies are computed from the configuration"

_SKIPS = (
    Skip("model.layers.{}.self_attn.rotary_emb.inv_freq", _RECOMPUTED),
    Skip("model.rotary_emb.inv_freq", _RECOMPUTED),
)


def _modules(config: DecoderConfig) -> Iterator[tuple[str, str, bool]]:
    """Modules of a layer: name under ``model.layers.{}.``, slot under ``layers.{}.``, whether there is a bias."""
    for one in "qkv":
        yield f"self_attn.{one}_proj", f"attn.{one}", config.qkv_bias
    yield "self_attn.o_proj", "attn.o", config.output_bias
    for one in ("gate", "up", "down"):
        yield f"mlp.{one}_proj", f"mlp.{one}", config.mlp_bias
    yield "input_layernorm", "input_norm", False
    yield "post_attention_layernorm", "post_attention_norm", False
    if config.head_norms:
        yield "self_attn.q_norm", "attn.q_norm", False
        yield "self_attn.k_norm", "attn.k_norm", False


def mapping(config: DecoderConfig) -> Mapping:
    """Rules for just those tensors that the configuration asks for: a bias or head that it does not know is unexpected."""
    rules: list[Rule] = [Rule("model.embed_tokens.weight", "embed.weight"), Rule("model.norm.weight", "norm.weight")]
    if not config.tied:
        rules.append(Rule("lm_head.weight", "lm_head.weight"))
    for module, slot, bias in _modules(config):
        for parameter in ("weight", "bias") if bias else ("weight",):
            rules.append(Rule(f"model.layers.{{}}.{module}.{parameter}", f"layers.{{}}.{slot}.{parameter}"))
    return Mapping(tuple(rules), _SKIPS)
