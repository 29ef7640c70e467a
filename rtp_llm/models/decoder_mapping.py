"""Hugging Face's tensor names of decoders: Llama's, which later families kept."""

from __future__ import annotations

from collections.abc import Iterator

from rtp_llm.models.decoder import DecoderConfig
from rtp_llm.plan.rules import Mapping, Part, Rule, Skip

_RECOMPUTED = "rotary frequencies are computed from the configuration"

#: Tables in older checkpoints, which are computed here.
ROTARY_SKIPS = (Skip("layers.{}.self_attn.rotary_emb.inv_freq", _RECOMPUTED), Skip("rotary_emb.inv_freq", _RECOMPUTED))


def _norms(config: DecoderConfig) -> Iterator[tuple[str, str]]:
    yield "input_layernorm", "input_norm"
    yield "post_attention_layernorm", "post_attention_norm"
    if config.head_norms:
        yield "self_attn.q_norm", "attn.q_norm"
        yield "self_attn.k_norm", "attn.k_norm"


def _linears(config: DecoderConfig) -> Iterator[tuple[str, str, bool]]:
    """Linear layers: name under ``layers.{}.``, slot under it, whether there is a bias."""
    for one in "qkv":
        yield f"self_attn.{one}_proj", f"attn.{one}", config.qkv_bias
    for one in ("gate", "up"):
        yield f"mlp.{one}_proj", f"mlp.{one}", config.mlp_bias


def _fused(config: DecoderConfig) -> Iterator[tuple[str, str, bool, tuple[Part, ...]]]:
    """The same for fused matrices: queries, keys and values, and gate and up."""
    heads = (Part("q", config.heads), Part("k", config.kv_heads), Part("v", config.kv_heads))
    yield "self_attn.qkv_proj", "attn.*", config.qkv_bias, heads
    yield "mlp.gate_up_proj", "mlp.*", config.mlp_bias, (Part("gate"), Part("up"))


def decoder_mapping(config: DecoderConfig, *, fused: bool = False) -> Mapping:
    """Rules for the tensors of this configuration; any other bias or head is unexpected.

    ``fused``: queries, keys and values are stacked by rows in ``qkv_proj``, and gate and up in ``gate_up_proj``.
    """
    rules = [Rule("embed_tokens.weight", "embed.weight"), Rule("norm.weight", "norm.weight")]
    if not config.tied:
        rules.append(Rule("lm_head.weight", "lm_head.weight"))
    linears = _fused(config) if fused else ((*linear, ()) for linear in _linears(config))
    alone = (("self_attn.o_proj", "attn.o", config.output_bias, ()), ("mlp.down_proj", "mlp.down", config.mlp_bias, ()))
    for module, slot, bias, parts in (*linears, *alone):
        for parameter in ("weight", "bias") if bias else ("weight",):
            rules.append(Rule(f"layers.{{}}.{module}.{parameter}", f"layers.{{}}.{slot}.{parameter}", parts=parts))
    rules += [Rule(f"layers.{{}}.{module}.weight", f"layers.{{}}.{slot}.weight") for module, slot in _norms(config)]
    if config.sinks:
        rules.append(Rule("layers.{}.self_attn.sinks", "layers.{}.attn.sinks"))
    return Mapping(tuple(rules), ROTARY_SKIPS)
