"""The decoder with multi-head latent attention: conditions, tensor names, assembly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from rtp_llm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from rtp_llm.layers.mla import MLAShape, MultiHeadLatentAttention
from rtp_llm.layers.mlp import GatedMLP, MLPShape
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.layers.rotary import Rotary, Unrotated
from rtp_llm.layers.transformer import CausalLM, DecoderLayer
from rtp_llm.models.decoder_mapping import ROTARY_SKIPS
from rtp_llm.models.latent_config import LatentConfig
from rtp_llm.models.moe import MoENames, moe_block, mtp_skip, with_moe
from rtp_llm.parallel.experts import ExpertLayers
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Divisibility
from rtp_llm.plan.rules import Mapping, Rule

#: DeepSeek's names of experts: one by one, or stacked, as in transformers' memory.
_EXPERTS = MoENames(bias="gate.e_score_correction_bias", shared="shared_experts")


def latent_conditions(config: LatentConfig) -> tuple[Divisibility, ...]:
    """Heads and intermediate sizes are split over the ranks; latents are not."""
    found = [Divisibility("attention heads", config.sizes.attention.heads)]
    if len(config.moe.layers) < config.sizes.layers:
        found.append(Divisibility("elements of intermediate_size", config.sizes.intermediate_size))
    return (*found, *config.moe.conditions())


def latent_experts(config: LatentConfig) -> ExpertLayers | None:
    """The experts to divide between expert-parallel ranks."""
    return config.moe.experts


def attention_modules(shape: MLAShape) -> Iterator[tuple[str, str, bool]]:
    """Modules of an attention block: name under ``self_attn.``, slot under ``attn.``, whether there is a bias."""
    if shape.q_lora_rank is None:
        yield "q_proj", "q", False
    else:
        yield "q_a_proj", "q_a", shape.bias
        yield "q_a_layernorm", "q_a_norm", False
        yield "q_b_proj", "q_b", False
    yield "kv_a_proj_with_mqa", "kv_a", shape.bias
    yield "kv_a_layernorm", "kv_a_norm", False
    yield "kv_b_proj", "kv_b", False
    yield "o_proj", "o", shape.bias
    if shape.indexer is not None:
        yield "indexer.wq_b", "index.q", False
        yield "indexer.wk", "index.k", False
        yield "indexer.k_norm", "index.k_norm", True
        yield "indexer.weights_proj", "index.weights", False


def module_rules(modules: Iterable[tuple[str, str, bool]], at: str, to: str) -> Iterator[Rule]:
    """Rules for the weights, and biases, of modules below ``layers.{}.{at}``, for slots below ``layers.{}.{to}``."""
    for module, slot, bias in modules:
        for parameter in ("weight", "bias") if bias else ("weight",):
            yield Rule(f"layers.{{}}.{at}{module}.{parameter}", f"layers.{{}}.{to}{slot}.{parameter}")


def mlp_rules(at: str, to: str) -> Iterator[Rule]:
    """Rules for a gated MLP below ``layers.{}.{at}``."""
    return module_rules(((f"{one}_proj", one, False) for one in ("gate", "up", "down")), at, to)


def common_rules(config: LatentConfig) -> Iterator[Rule]:
    """Rules for what is neither attention nor MLP."""
    yield Rule("embed_tokens.weight", "embed.weight")
    yield Rule("norm.weight", "norm.weight")
    if not config.tied:
        yield Rule("lm_head.weight", "lm_head.weight")
    norms = (("input_layernorm", "input_norm", False), ("post_attention_layernorm", "post_attention_norm", False))
    yield from module_rules(norms, "", "")


def with_latent_experts(config: LatentConfig, rules: Iterable[Rule], *names: MoENames) -> Mapping:
    """The mapping of ``rules`` and those of experts; it skips layers for multi-token prediction, with their experts."""
    skipped = mtp_skip(config.sizes.layers, config.mtp_layers)
    return with_moe(Mapping(tuple(rules), ROTARY_SKIPS), config.moe, *names, skipped_layers=skipped)


def latent_mapping(config: LatentConfig) -> Mapping:
    """DeepSeek's tensor names, which other families use too.

    Rules for the tensors of this configuration; any other bias or head is unexpected.
    """
    rules: list[Rule] = [*common_rules(config), *module_rules(attention_modules(config.sizes.attention), "self_attn.", "attn.")]
    if len(config.moe.layers) < config.sizes.layers:
        rules += mlp_rules("mlp.", "mlp.")
    return with_latent_experts(config, rules, _EXPERTS)


def build_latent(
    config: LatentConfig,
    groups: Groups,
    dtype: torch.dtype,
    *,
    attention: Callable[[int], nn.Module] | None = None,
) -> CausalLM:
    """The model of one rank, on the meta device.  ``attention`` builds the block of a layer, by its number, for families that
    also have other attention."""
    sizes, tp = config.sizes, groups.tp

    def latent_attention(layer: int) -> nn.Module:
        return MultiHeadLatentAttention(f"layers.{layer}.attn", sizes.attention, layer=layer, tp=tp, dtype=dtype)

    def dense(layer: int) -> nn.Module:
        return GatedMLP(f"layers.{layer}.mlp", MLPShape(sizes.hidden_size, sizes.intermediate_size, sizes.act), tp=tp, dtype=dtype)

    def norm(slot: str) -> RMSNorm:
        return RMSNorm(slot, sizes.hidden_size, sizes.norm_eps, dtype=dtype)

    mlp = moe_block(config.moe, dense, groups, dtype)
    layers = [
        DecoderLayer((attention or latent_attention)(i), mlp(i), norm(f"layers.{i}.input_norm"), norm(f"layers.{i}.post_attention_norm"))
        for i in range(sizes.layers)
    ]
    embed = VocabParallelEmbedding("embed", sizes.vocab_size, sizes.hidden_size, tp=tp, dtype=dtype)
    head = None if config.tied else ParallelLMHead("lm_head", sizes.vocab_size, sizes.hidden_size, tp=tp, dtype=dtype)
    return CausalLM(embed, layers, norm("norm"), head, _rotary(config))


def _rotary(config: LatentConfig) -> Rotary:
    if config.sizes.rope is None:
        return Unrotated()
    return Rotary(config.sizes.rope, wide=config.wide_rotary)
