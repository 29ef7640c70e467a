"""The model families, and the family of an architecture in ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.models.family import Family, Features
from rtp_llm.models.faults import ModelFault
from rtp_llm.models.reader import CONFIG_FILE


def register(families: Iterable[Family]) -> tuple[Family, ...]:
    """The families as a table, sorted by name.

    Raises:
        ConfigError: ``DUPLICATE_ARCHITECTURE``, for every name or architecture that is registered twice.
    """
    table = tuple(sorted(families, key=lambda family: family.name))
    owners: dict[str, list[str]] = {}
    for family in table:
        for key in (f"family {family.name}", *(f"architecture {a}" for a in family.architectures)):
            owners.setdefault(key, []).append(family.module)
    doubled = [
        Problem(ModelFault.DUPLICATE_ARCHITECTURE, f"{key} is registered twice", expected="one family", actual=", ".join(modules))
        for key, modules in owners.items()
        if len(modules) > 1
    ]
    if doubled:
        raise ConfigError(doubled)
    return table


#: Features of families with experts.
_EXPERTS = Features(expert_parallel=True)

FAMILIES: tuple[Family, ...] = register(
    (
        Family("bert", "encoder", ("BertModel", "BertForMaskedLM", "BertForPreTraining"), "rtp_llm.models.bert"),
        Family("deepseek_v2", "causal", ("DeepseekV2ForCausalLM",), "rtp_llm.models.deepseek_v2", _EXPERTS),
        Family("deepseek_v3", "causal", ("DeepseekV3ForCausalLM",), "rtp_llm.models.deepseek_v3", _EXPERTS),
        Family("deepseek_v32", "causal", ("DeepseekV32ForCausalLM",), "rtp_llm.models.deepseek_v32", _EXPERTS),
        Family("glm4_moe", "causal", ("Glm4MoeForCausalLM",), "rtp_llm.models.glm4_moe", _EXPERTS),
        Family("glm4_moe_lite", "causal", ("Glm4MoeLiteForCausalLM",), "rtp_llm.models.glm4_moe_lite", _EXPERTS),
        Family("gpt_oss", "causal", ("GptOssForCausalLM",), "rtp_llm.models.gpt_oss", _EXPERTS),
        Family("kimi_linear", "causal", ("KimiLinearForCausalLM",), "rtp_llm.models.kimi_linear", _EXPERTS),
        Family("llama", "causal", ("LlamaForCausalLM",), "rtp_llm.models.llama"),
        Family("mistral", "causal", ("MistralForCausalLM",), "rtp_llm.models.mistral"),
        Family("mixtral", "causal", ("MixtralForCausalLM",), "rtp_llm.models.mixtral", _EXPERTS),
        Family("phi3", "causal", ("Phi3ForCausalLM",), "rtp_llm.models.phi3"),
        Family("qwen2", "causal", ("Qwen2ForCausalLM",), "rtp_llm.models.qwen2"),
        Family("qwen2_moe", "causal", ("Qwen2MoeForCausalLM",), "rtp_llm.models.qwen2_moe", _EXPERTS),
        Family("qwen3", "causal", ("Qwen3ForCausalLM",), "rtp_llm.models.qwen3"),
        Family("qwen3_moe", "causal", ("Qwen3MoeForCausalLM",), "rtp_llm.models.qwen3_moe", _EXPERTS),
        Family(
            "roberta",
            "encoder",
            ("RobertaModel", "RobertaForMaskedLM", "XLMRobertaModel", "XLMRobertaForMaskedLM"),
            "rtp_llm.models.roberta",
        ),
    )
)


def find_family(architectures: Sequence[str], families: Sequence[Family] = FAMILIES) -> Family:
    """The family of the one architecture that a checkpoint names.

    Raises:
        ConfigError: ``UNKNOWN_ARCHITECTURE``: none, several, or one that no family knows; the message lists the known ones.
    """
    known = {architecture: family for family in families for architecture in family.architectures}
    if len(architectures) == 1 and architectures[0] in known:
        return known[architectures[0]]
    raise ConfigError(
        Problem(
            ModelFault.UNKNOWN_ARCHITECTURE,
            "field architectures",
            file=CONFIG_FILE,
            expected=f"one of {', '.join(sorted(known))}",
            actual=", ".join(map(str, architectures)) or "none",
        )
    )
