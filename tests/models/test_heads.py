"""Which tensors a checkpoint holds decides: heads, biases, layers and leftovers, each way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import load_model
from rtp_llm.errors import PlanError
from tests.models.decoders import configured
from tests.models.reference import distance, make, token_ids

Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Rewrites a checkpoint of one file."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file, metadata={"format": "pt"})


def test_tied_without_a_head_shares_one_parameter(tmp_path: Path) -> None:
    """One table serves both ends, and takes memory once."""
    make(*configured("llama-tied"), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    assert [name for name, p in model.named_parameters() if 101 in p.shape] == ["embed.weight"]


def test_a_head_in_the_file_is_loaded_whatever_the_flag_says(tmp_path: Path) -> None:
    """A configuration that says "tied" beside a head of its own: the head scores, as the same weights untied would."""
    tied, untied = tmp_path / "tied", tmp_path / "untied"
    make(*configured("llama-tied"), tied)
    head = torch.randn(101, 48, generator=torch.Generator().manual_seed(5)) * 0.15
    edit(tied, lambda t: {**t, "lm_head.weight": head})
    model_class, config = configured("llama")
    reference = make(model_class, config, untied)
    edit(untied, lambda _: load_file(tied / "model.safetensors"))
    reference = model_class.from_pretrained(untied)
    model = load_model(tied, device="cpu").model
    with torch.inference_mode():
        assert torch.equal(model.lm_head.weight, head)
        assert distance(model(token_ids()), reference(token_ids()).logits) < 1e-4


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_an_untied_head_that_is_absent_is_missing(variant: str, tmp_path: Path) -> None:
    """Never tied in silence: the error names ``lm_head.weight`` as the file would."""
    make(*configured(variant), tmp_path)
    edit(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if name != "lm_head.weight"})
    with pytest.raises(PlanError, match=r"MISSING_TENSOR.*tensor lm_head\.weight"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("variant", "extra"),
    [
        ("llama", "model.layers.0.self_attn.q_proj.bias"),
        ("llama", "model.layers.0.self_attn.q_norm.weight"),
        ("llama", "model.layers.2.input_layernorm.weight"),
        ("qwen2", "model.layers.1.self_attn.o_proj.bias"),
        ("mistral-window", "model.layers.1.mlp.up_proj.bias"),
        ("llama-tied", "model.embed_tokens.bias"),
    ],
)
def test_a_tensor_that_the_configuration_does_not_know_is_refused(variant: str, extra: str, tmp_path: Path) -> None:
    """A bias, norm or layer beyond what ``config.json`` asks for would change what the model computes."""
    make(*configured(variant), tmp_path)
    edit(tmp_path, lambda t: {**t, extra: torch.ones(48)})
    with pytest.raises(PlanError, match=rf"UNEXPECTED_TENSOR.*tensor {extra}"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "qwen3"])
def test_a_missing_vector_is_refused(variant: str, tmp_path: Path) -> None:
    """Every bias and norm that the configuration asks for must be there; all that are not are named at once."""
    model_class, config = configured(variant)
    model = make(model_class, config, tmp_path)
    lost = [name for name, p in model.named_parameters() if p.dim() == 1 and name.startswith("model.layers.1.")]
    assert len(lost) >= 4
    edit(tmp_path, lambda t: {name: tensor for name, tensor in t.items() if name not in lost})
    with pytest.raises(PlanError) as caught:
        load_model(tmp_path, device="cpu")
    assert sorted(problem.tensor for problem in caught.value.problems) == sorted(lost)


def test_stored_frequencies_are_skipped_by_name(tmp_path: Path) -> None:
    """Old files hold ``rotary_emb.inv_freq``, once or for each layer: a named skip with its reason, not an error."""
    make(*configured("llama"), tmp_path)
    names = ["model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"]
    edit(tmp_path, lambda t: {**t, **{name: torch.full((4,), 9.0) for name in names}})
    skipped = load_model(tmp_path, device="cpu").plan.skipped
    assert sorted(skip.raw for skip in skipped) == sorted(names)
    assert all("configuration" in skip.reason for skip in skipped)
