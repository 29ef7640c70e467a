"""Families with latent attention compute what transformers computes, and load and export every spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rtp_llm import RtpLlmError, build_plan, load_model
from rtp_llm.loader.export import export_checkpoint
from rtp_llm.models.registry import find_family
from rtp_llm.parallel.groups import Groups
from tests.models.decoders import reference_steps
from tests.models.latents import VARIANTS, restore, save, save_as_held, stored
from tests.models.reference import closeness, distance, token_ids

#: The prompt, one token, and a few at once.
STEPS = [15, 1, 8]
#: One variant of each family.
ONE_EACH = ["v2-lite", "v3-yarn", "v32", "glm-lite", "kimi-linear"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """float32 logits differ by less than 1e-4, without a cache and, step by step, with one, which changes nothing."""
    reference = save(variant, tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids()
    with torch.inference_mode():
        whole = model(ids)
        assert distance(whole, reference(ids).logits) < 1e-4
        cache = model.new_cache(len(ids), ids.shape[1])
        stepped = torch.cat([model(part, cache) for part in ids.split(STEPS, dim=1)], dim=1)
    assert distance(stepped, reference_steps(reference, ids, STEPS)) < 1e-4
    assert distance(stepped, whole) < 1e-4
    assert cache.length == ids.shape[1]


@pytest.mark.parametrize("variant", [*ONE_EACH, "v2-groups"])
def test_bfloat16_checkpoints(variant: str, tmp_path: Path) -> None:
    """A bfloat16 checkpoint stays bfloat16 but for what transformers keeps in float32, and its logits point where
    transformers' point: cosine above 0.999."""
    reference = save(variant, tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids()
    wide = {name for name, parameter in model.named_parameters() if parameter.dtype != torch.bfloat16}
    assert {name.split(".")[-2] for name in wide} <= {"router", "k_norm", "forget"}
    with torch.inference_mode():
        assert closeness(model(ids), reference(ids).logits) > 0.999


@pytest.mark.parametrize("variant", ONE_EACH)
def test_the_spelling_of_memory_is_the_same_model(variant: str, tmp_path: Path) -> None:
    """A checkpoint under the names of transformers' memory, experts stacked, gives the same logits to the last bit."""
    saved, held = tmp_path / "saved", tmp_path / "held"
    save_as_held(save(variant, saved), saved, held)
    assert stored(saved).keys() != stored(held).keys()
    assert torch.equal(run(saved), run(held))


@pytest.mark.parametrize("variant", ONE_EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_gives_back_the_checkpoint(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Names, shapes, dtypes and bytes of every tensor, in both spellings."""
    saved, held = tmp_path / "saved", tmp_path / "held"
    save_as_held(save(variant, saved, dtype=dtype), saved, held)
    for source in (saved, held):
        out = export_checkpoint(load_model(source, device="cpu"), tmp_path / f"{source.name}-out")
        before, after = stored(source), stored(out)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


@pytest.mark.parametrize("family", ["v3", "glm-lite", "v32"])
def test_layers_for_multi_token_prediction_are_skipped_by_name(family: str, tmp_path: Path) -> None:
    """All of layer ``num_hidden_layers``, its experts and its copies of embedding and head included, is in the plan with a
    reason, and changes nothing."""
    save(family, tmp_path)
    before = run(tmp_path)
    tensors, added = with_mtp(stored(tmp_path), last=3)
    restore(tmp_path, tensors)
    loaded = load_model(tmp_path, device="cpu")
    assert {skip.raw for skip in loaded.plan.skipped} == added
    assert any(".experts." in name for name in added) and any("embed_tokens" in name for name in added)
    assert all("multi-token prediction" in skip.reason for skip in loaded.plan.skipped)
    with torch.inference_mode():
        assert torch.equal(loaded.model(token_ids()), before)


def run(folder: Path) -> torch.Tensor:
    """The logits of a checkpoint, on one rank."""
    model = load_model(folder, device="cpu").model
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids())
    return logits


def with_mtp(tensors: dict[str, torch.Tensor], last: int) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Adds a layer ``last`` for multi-token prediction: a copy of the one before, and what only such layers have."""
    before, at = f"model.layers.{last - 1}.", f"model.layers.{last}."
    added = {at + name.removeprefix(before): tensor.clone() for name, tensor in tensors.items() if name.startswith(before)}
    width = tensors["model.norm.weight"].shape[0]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        added[f"{at}{name}.weight"] = torch.ones(width)
    added[f"{at}eh_proj.weight"] = torch.zeros(width, 2 * width)
    for name in ("embed_tokens", "shared_head.head"):
        added[f"{at}{name}.weight"] = tensors["model.embed_tokens.weight"].clone()
    return {**tensors, **added}, set(added)


def test_a_layer_too_many_is_not_excused(tmp_path: Path) -> None:
    """A layer behind the last one that predicts nothing is unexpected: ``num_hidden_layers`` is wrong."""
    save("v3", tmp_path)
    tensors, _ = with_mtp(stored(tmp_path), last=3)
    restore(tmp_path, {name: tensor for name, tensor in tensors.items() if ".eh_proj." not in name})
    plan = build_plan(tmp_path)
    assert not plan.skipped
    assert {name.split(".")[2] for name in plan.unexpected} == {"3"}


@pytest.mark.parametrize("value", [None, ...])
def test_no_rank_means_no_latent_of_queries(value: Any, tmp_path: Path) -> None:
    """``q_lora_rank`` that is null and one that is absent are the same."""
    reference = save("v3-no-latent", tmp_path)
    restore(tmp_path, stored(tmp_path), q_lora_rank=value)
    with torch.inference_mode():
        wanted = reference(token_ids()).logits
    assert distance(run(tmp_path), wanted) < 1e-4


@pytest.mark.parametrize("variant", ["v2", "v3", "kimi-linear-groups"])
def test_latents_have_an_epsilon_of_their_own(variant: str, tmp_path: Path) -> None:
    """Latents so small that the epsilon of their norms decides: it is not ``rms_norm_eps``."""
    reference = save(variant, tmp_path)
    tensors = stored(tmp_path)
    for name in tensors:
        if ".q_a_proj." in name or ".kv_a_proj_with_mqa." in name:
            tensors[name] *= 1e-3
    restore(tmp_path, tensors, rms_norm_eps=1e-3)
    reference = type(reference).from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        wanted = reference(token_ids()).logits
    assert distance(run(tmp_path), wanted) < 1e-4


def test_kimi_linear_as_published(tmp_path: Path) -> None:
    """The published config.json, which counts layers from 1 and holds delta attention's sizes in an object of its own, is the
    same model as the one that transformers writes; transformers agrees."""
    reference = save("kimi-linear", tmp_path)
    before = run(tmp_path)
    kda = {"kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 12, "short_conv_kernel_size": 4}
    absent = dict.fromkeys(("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"), ...)
    restore(
        tmp_path,
        stored(tmp_path),
        **absent,
        linear_attn_config=kda,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        mla_use_nope=True,
        moe_router_activation_func="sigmoid",
        use_grouped_topk=True,
        num_nextn_predict_layers=0,
    )
    reference = type(reference).from_pretrained(tmp_path).eval()
    with torch.inference_mode():
        wanted = reference(token_ids()).logits
    assert torch.equal(run(tmp_path), before)
    assert distance(before, wanted) < 1e-4


def test_dense_layers_by_frequency(tmp_path: Path) -> None:
    """``moe_layer_freq`` makes dense those layers whose number it does not divide, as the published code does."""
    from rtp_llm.models.deepseek_v3.config import parse_config

    fields = {"num_hidden_layers": 7, "first_k_dense_replace": 2, "moe_layer_freq": 2}
    assert parse_config(fields, ()).moe.layers == (2, 4, 6)


PUBLISHED = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "DeepseekV3ForCausalLM": {"q_lora_rank": 1536},
    "DeepseekV32ForCausalLM": {"q_lora_rank": 1536},
    "Glm4MoeLiteForCausalLM": {"q_lora_rank": 768},
    "KimiLinearForCausalLM": {},
}


@pytest.mark.parametrize("architecture", PUBLISHED)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """Fields that config.json omits have the values of the family's transformers class."""
    import transformers

    theirs = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**PUBLISHED[architecture])
    config = find_family([architecture]).load().parse_config(PUBLISHED[architecture], ())
    latent = getattr(config, "latent", config)
    sizes, shape, moe = latent.sizes, latent.sizes.attention, latent.moe
    ours = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.layers,
        "rms_norm_eps": sizes.norm_eps,
        "max_position_embeddings": sizes.max_position_embeddings,
        "num_attention_heads": shape.heads,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_nope_head_dim": shape.nope_dim,
        "qk_rope_head_dim": shape.rope_dim,
        "v_head_dim": shape.value_dim,
        "moe_intermediate_size": moe.shape.intermediate_size,
        "routed_scaling_factor": moe.shape.routing.scale,
        "num_experts_per_tok": moe.shape.routing.top_k,
    }
    assert ours == {name: getattr(theirs, name) for name in ours}
    experts = theirs.n_routed_experts if architecture != "KimiLinearForCausalLM" else theirs.num_local_experts
    assert moe.shape.routing.experts == experts
    assert moe.shape.shared_size == theirs.n_shared_experts * theirs.moe_intermediate_size
    assert (moe.shape.routing.groups, moe.shape.routing.top_groups) == (theirs.n_group or 1, theirs.topk_group or 1)
    if hasattr(theirs, "mlp_layer_types"):
        assert moe.layers == tuple(i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse")
    else:
        assert moe.layers == tuple(range(theirs.first_k_dense_replace, theirs.num_hidden_layers))
    if architecture == "KimiLinearForCausalLM":
        assert config.linear == {i for i, kind in enumerate(theirs.layer_types) if kind == "linear_attention"}
        ours_kda = (config.kda.heads, config.kda.head_dim, config.kda.kernel)
        assert ours_kda == (theirs.linear_num_heads, theirs.linear_head_dim, theirs.linear_conv_kernel_dim)


#: The architecture, what config.json of the published model says where it is not the default, and the number of parameters.
SIZES: dict[str, tuple[str, dict[str, Any], int]] = {
    "DeepSeek-V2-Lite": (
        "DeepseekV2ForCausalLM",
        {
            "hidden_size": 2048,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
        },
        15_706_484_224,
    ),
    "DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "q_lora_rank": 1536,
            "n_routed_experts": 160,
            "first_k_dense_replace": 1,
            "num_experts_per_tok": 6,
        },
        235_741_434_880,
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {"q_lora_rank": 1536}, 671_026_419_200),
    "Kimi-Linear-48B-A3B": (
        "KimiLinearForCausalLM",
        {"linear_attn_config": {"full_attn_layers": [*range(4, 25, 4), 27], "kda_layers": [i for i in range(1, 27) if i % 4]}},
        49_122_681_728,
    ),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_models_have_their_published_size(name: str) -> None:
    """At full size, to the last parameter (without the layer for multi-token prediction)."""
    architecture, raw, parameters = SIZES[name]
    implementation = find_family([architecture]).load()
    model = implementation.build(implementation.parse_config(raw, ()), Groups(), torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


BAD = [
    ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method"),
    ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("DeepseekV2ForCausalLM", {"num_experts_per_tok": None}, "num_experts_per_tok"),
    ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func"),
    ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads"),
    ("DeepseekV3ForCausalLM", {"n_group": 3}, "n_group"),
    ("DeepseekV3ForCausalLM", {"topk_group": 9}, "topk_group"),
    ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ("DeepseekV3ForCausalLM", {"n_shared_experts": 10**6}, "n_shared_experts"),
    ("DeepseekV3ForCausalLM", {"n_routed_experts": None}, "n_routed_experts"),
    ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "q_lora_rank"),
    ("DeepseekV32ForCausalLM", {"index_head_dim": 32}, "index_head_dim"),
    ("DeepseekV32ForCausalLM", {"layer_types": ["full_attention"] * 61}, "layer_types"),
    ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
    ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope"),
    ("KimiLinearForCausalLM", {"hidden_act": "gelu"}, "hidden_act"),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": [1, 1], "full_attn_layers": []}}, "linear_attn_config.kda_layers"),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"num_heads": 0}}, "linear_attn_config.num_heads"),
    ("KimiLinearForCausalLM", {"linear_attn_config": {"kda_layers": ["x"], "full_attn_layers": {}}}, "linear_attn_config.kda_layers"),
]


@pytest.mark.parametrize(("architecture", "fields", "named"), BAD)
def test_bad_fields_are_named(architecture: str, fields: dict[str, Any], named: str) -> None:
    """What a family cannot do, or no model can have, is one problem that names the field; a second mistake is another."""
    parse = find_family([architecture]).load().parse_config
    with pytest.raises(RtpLlmError) as caught:
        parse({**PUBLISHED[architecture], **fields, "vocab_size": -1}, ())
    assert {problem.what for problem in caught.value.problems} == {f"field {named}", "field vocab_size"}


def test_a_correction_bias_in_bfloat16_is_refused(tmp_path: Path) -> None:
    """Rounded to bfloat16 it has lost what it is there for."""
    save("v3", tmp_path)
    tensors = stored(tmp_path)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    restore(tmp_path, tensors | {name: tensors[name].bfloat16()})
    problems = build_plan(tmp_path).problems
    assert [problem.code for problem in problems] == ["PRECISION_LOST"]
    assert problems[0].tensor == name


def test_the_cache_is_small(tmp_path: Path) -> None:
    """A token takes a latent and a shared key, not keys and values of all heads."""
    save("v3", tmp_path)
    model = load_model(tmp_path, device="cpu").model
    # Ten tokens take one page of sixteen; another belongs to no sequence.
    assert model.new_cache(1, 10).nbytes == 3 * 2 * 16 * (20 + 8) * 4


def test_headers_name_what_the_checkpoint_has(tmp_path: Path) -> None:
    """What these tests call the published spelling is it: experts one by one, and DeepSeek's and Kimi's own names."""
    for variant, name in (
        ("v3", "model.layers.1.mlp.experts.7.gate_proj.weight"),
        ("kimi-linear", "model.layers.1.block_sparse_moe.experts.7.w1.weight"),
        ("kimi-linear", "model.layers.0.self_attn.q_conv1d.weight"),
        ("kimi-linear", "model.layers.0.self_attn.A_log"),
    ):
        folder = tmp_path / f"{variant}-{name}"
        save(variant, folder)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert name in file.keys()
        assert json.loads((folder / "config.json").read_text())["architectures"]
