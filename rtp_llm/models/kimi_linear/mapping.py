"""Tensor names of Kimi Linear: as published, as transformers saves them, and as it holds them in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rtp_llm.models.kimi_linear.config import KimiConfig
from rtp_llm.models.latent import attention_modules, common_rules, mlp_rules, module_rules, with_latent_experts
from rtp_llm.models.moe import MoENames
from rtp_llm.plan.experts import ExpertNames
from rtp_llm.plan.rules import Mapping, Part, Rule

_AT = "layers.{}.self_attn."
_SLOT = "layers.{}.attn."

#: The published spelling of experts, and that of the model in transformers' memory.
_EXPERTS = tuple(
    MoENames(at=at, bias="gate.e_score_correction_bias", shared="shared_experts", experts=(experts,))
    for at, experts in (
        ("layers.{}.block_sparse_moe", ExpertNames("layers.{}.block_sparse_moe.experts", gate="w1", up="w3", down="w2")),
        ("layers.{}.mlp", ExpertNames("layers.{}.mlp.experts")),
    )
)

#: The decay's parts, which transformers keeps in their own module.
_DECAY = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
_DECAY_SLOTS = ("f_a.weight", "f_b.weight", "a_log", "dt_bias")


def _linear_attention() -> Iterator[Rule]:
    """Rules for delta attention, without the names that latent attention has too."""
    for one in "kv":
        yield Rule(f"{_AT}{one}_proj.weight", f"{_SLOT}{one}.weight")
    for one in "qkv":
        yield Rule(f"{_AT}{one}_conv1d.weight", f"{_SLOT}{one}_conv.weight")
    # transformers stacks the three convolutions by rows.
    yield Rule(f"{_AT}conv1d.weight", f"{_SLOT}*_conv.weight", parts=tuple(map(Part, "qkv")))
    for name in ("b", "g_a", "g_b"):
        yield Rule(f"{_AT}{name}_proj.weight", f"{_SLOT}{name}.weight")
    yield Rule(f"{_AT}o_norm.weight", f"{_SLOT}o_norm.weight")
    for at in ("", "forget_gate."):
        for name, slot in zip(_DECAY, _DECAY_SLOTS, strict=True):
            yield Rule(f"{_AT}{at}{name}", f"{_SLOT}{slot}")


def _unique(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Unique rules: both kinds of attention have queries and an output, with the same names and slots."""
    return tuple({rule.raw: rule for rule in rules}.values())


def mapping(config: KimiConfig) -> Mapping:
    """Rules for every spelling of the tensors of this configuration."""
    latent = config.latent
    rules: list[Rule] = [*common_rules(latent)]
    if config.linear:
        rules += [Rule(f"{_AT}{one}_proj.weight", f"{_SLOT}{one}.weight") for one in "qo"]
        rules += _linear_attention()
    if len(config.linear) < latent.sizes.layers:
        rules += module_rules(attention_modules(latent.sizes.attention), "self_attn.", "attn.")
    # transformers renames dense layers along with experts when it saves.
    for at in ("mlp.", "block_sparse_moe."):
        rules += mlp_rules(at, "mlp.")
    return with_latent_experts(latent, _unique(rules), *_EXPERTS)
