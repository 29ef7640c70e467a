"""Every decoder family computes what transformers computes, from a checkpoint that transformers saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.layers.faults import ForwardError
from tests.models.decoders import VARIANTS, configured, reference_steps
from tests.models.reference import VOCAB, closeness, distance, make, token_ids

#: The prompt, one token, and a few at once.
STEPS = [15, 1, 8]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """float32 logits differ by less than 1e-4, without a cache and, step by step, with one."""
    reference = make(*configured(variant), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids()
    with torch.inference_mode():
        assert distance(model(ids), reference(ids).logits) < 1e-4
        cache = model.new_cache(len(ids), ids.shape[1])
        stepped = torch.cat([model(part, cache) for part in ids.split(STEPS, dim=1)], dim=1)
    assert distance(stepped, reference_steps(reference, ids, STEPS)) < 1e-4
    assert cache.length == ids.shape[1]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in ("llama-dynamic", "llama-longrope", "phi3-longrope-partial")])
def test_a_cache_changes_nothing(variant: str, tmp_path: Path) -> None:
    """Prefill and decode give the logits of one pass.  (Rotations that depend on the length do not, by their definition.)"""
    make(*configured(variant), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids()
    with torch.inference_mode():
        cache = model.new_cache(len(ids), 40)
        stepped = torch.cat([model(part, cache) for part in ids.split(STEPS, dim=1)], dim=1)
        assert distance(stepped, model(ids)) < 1e-4


@pytest.mark.parametrize("variant", ["llama-biases", "mistral-window", "qwen2", "qwen3-tied-biases"])
def test_bfloat16_checkpoints(variant: str, tmp_path: Path) -> None:
    """A bfloat16 checkpoint stays bfloat16, and its logits point where transformers' point: cosine above 0.999."""
    reference = make(*configured(variant), tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        assert closeness(model(ids), reference(ids).logits) > 0.999


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen2-tied", "qwen3"])
def test_sharded_checkpoints_are_the_same_models(variant: str, tmp_path: Path) -> None:
    """A checkpoint in many files gives the same logits to the last bit as one in a single file."""
    for folder, size in ((tmp_path / "one", "1GB"), (tmp_path / "many", "30KB")):
        make(*configured(variant), folder, max_shard_size=size)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = (load_model(tmp_path / name, device="cpu").model for name in ("one", "many"))
    with torch.inference_mode():
        assert torch.equal(one(token_ids()), many(token_ids()))


def test_a_dtype_may_be_asked_for(tmp_path: Path) -> None:
    """``dtype`` casts every parameter; float32 from bfloat16 is what transformers makes of it."""
    model_class, config = configured("llama")
    make(model_class, config, tmp_path, dtype=torch.bfloat16)
    reference = model_class.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(tmp_path, device="cpu", load=LoadConfig(dtype="float32")).model
    with torch.inference_mode():
        assert distance(model(token_ids()), reference(token_ids()).logits) < 1e-4


@pytest.mark.parametrize(
    ("ids", "word"),
    [
        (torch.tensor([[0, VOCAB]]), "0 to 100"),
        (torch.tensor([[-1, 3]]), "0 to 100"),
        (torch.tensor([1, 2]), "batch, seq"),
        (torch.empty(1, 0, dtype=torch.int64), "batch, seq"),
        (torch.zeros(1, 2), "whole numbers"),
    ],
)
def test_bad_ids_are_refused(ids: torch.Tensor, word: str, tmp_path: Path) -> None:
    """Ids that are no ids are an error that says what is expected, not a crash or a silent zero row."""
    make(*configured("llama"), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    with pytest.raises(ForwardError, match=word):
        model(ids)


def test_a_cache_that_does_not_fit_is_refused_and_stays_whole(tmp_path: Path) -> None:
    """Too many tokens, or another batch, are refused before anything is written."""
    make(*configured("llama"), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids = token_ids(2, 6)
    cache = model.new_cache(2, 7)
    with torch.inference_mode():
        model(ids[:, :5], cache)
        with pytest.raises(ForwardError, match="at most 2 more tokens"):
            model(ids[:, :3], cache)
        with pytest.raises(ForwardError, match="another batch"):
            model(ids[:1, 5:], cache)
        assert distance(model(ids[:, 5:], cache)[:, -1], model(ids)[:, -1]) < 1e-4
    with pytest.raises(ForwardError, match="without room"):
        model.new_cache(0, 7)


def test_smollm2_speaks_like_transformers(smollm2: Path) -> None:
    """A real model: bfloat16 logits of a sentence equal those of transformers by cosine, and so does each next token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(smollm2)("The capital of France is Paris, and the capital of", return_tensors="pt").input_ids
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    model = load_model(smollm2, device="cpu").model
    with torch.inference_mode():
        ours, theirs = model(ids), reference(ids).logits
    assert closeness(ours, theirs) > 0.999
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
