"""Every encoder family computes what transformers computes, whatever head, prefix or spelling its checkpoint has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import load_model
from rtp_llm.errors import PlanError
from rtp_llm.layers.faults import ForwardError
from tests.models.encoders import VARIANTS, configured
from tests.models.reference import closeness, distance, make, token_ids

#: The second sequence has 17 tokens and then padding (id 1, where RoBERTa looks for it).
REAL = 17


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``attention_mask``, ``[2, 24]``."""
    ids = token_ids().clamp(min=2)
    mask = torch.ones_like(ids)
    ids[1, REAL:], mask[1, REAL:] = 1, 0
    return ids, mask


def rewrite(folder: Path, name: Callable[[str], str | None]) -> None:
    """Renames a checkpoint's tensors; None drops one."""
    file = folder / "model.safetensors"
    tensors = {new: tensor.clone() for old, tensor in load_file(file).items() if (new := name(old)) is not None}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_and_pooler_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """With padding, with and without token types; differences below 1e-4 at real tokens.  Padding is seen by nobody."""
    reference = make(*configured(variant), tmp_path)
    base = getattr(reference, reference.base_model_prefix, reference)
    model = load_model(tmp_path, device="cpu").model
    ids, mask = inputs()
    types = (torch.arange(ids.shape[1]) % base.config.type_vocab_size).expand_as(ids)
    with torch.inference_mode():
        for kwargs in ({"attention_mask": mask}, {"attention_mask": mask, "token_type_ids": types}, {}):
            ours, theirs = model(ids, **kwargs), base(ids, **kwargs)
            real = mask.bool() if "attention_mask" in kwargs else torch.ones_like(mask).bool()
            assert distance(ours[real], theirs.last_hidden_state[real]) < 1e-4
            if theirs.pooler_output is not None:
                assert distance(model.pool(ours), theirs.pooler_output) < 1e-4
        short = model(ids[1:, :REAL])
        assert distance(short, model(ids, mask)[1:, :REAL]) < 1e-4


@pytest.mark.parametrize(
    ("variant", "pooler", "heads"),
    [("bert", True, 0), ("bert-masked-lm", False, 5), ("bert-pretraining", True, 7), ("roberta", True, 0), ("roberta-masked-lm", False, 5)],
)
def test_heads_are_skipped_by_name(variant: str, pooler: bool, heads: int, tmp_path: Path) -> None:
    """Training heads are named skips with a reason; a pooler is there where the file holds one."""
    make(*configured(variant), tmp_path)
    loaded = load_model(tmp_path, device="cpu")
    assert len(loaded.plan.skipped) == heads
    assert all("head" in skipped.reason for skipped in loaded.plan.skipped)
    assert (loaded.model.pooler is not None) is pooler


@pytest.mark.parametrize("variant", ["bert", "roberta"])
@pytest.mark.parametrize("spelling", ["prefix", "gamma", "positions"])
def test_old_spellings_are_the_same_model(variant: str, spelling: str, tmp_path: Path) -> None:
    """A ``bert.`` in front, ``gamma`` and ``beta``, or stored position ids change nothing."""
    reference = make(*configured(variant), tmp_path)
    if spelling == "prefix":
        rewrite(tmp_path, lambda name: f"{variant}.{name}")
    elif spelling == "gamma":
        rewrite(tmp_path, lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"))
        assert "embeddings.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
    else:
        file = tmp_path / "model.safetensors"
        save_file({**load_file(file), "embeddings.position_ids": torch.arange(40)[None]}, file, metadata={"format": "pt"})
    loaded = load_model(tmp_path, device="cpu")
    ids, mask = inputs()
    with torch.inference_mode():
        ours, theirs = loaded.model(ids, mask), reference(ids, attention_mask=mask)
        assert distance(ours[mask.bool()], theirs.last_hidden_state[mask.bool()]) < 1e-4
        assert distance(loaded.model.pool(ours), theirs.pooler_output) < 1e-4


def test_both_spellings_at_once_are_refused(tmp_path: Path) -> None:
    """Two tensors for one place: neither is chosen in silence."""
    make(*configured("bert"), tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "embeddings.LayerNorm.gamma": torch.ones(48)}, file, metadata={"format": "pt"})
    with pytest.raises(PlanError, match=r"DOUBLED_TENSOR.*embeddings\.LayerNorm"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("lost", "named"),
    [("pooler.dense.bias", "pooler.dense.bias"), ("encoder.layer.1.output.dense.weight", "encoder.layer.1.output.dense.weight")],
)
def test_half_a_model_is_refused(lost: str, named: str, tmp_path: Path) -> None:
    """A pooler without its bias, or a layer without a matrix, is missing a tensor, which the error names."""
    make(*configured("bert"), tmp_path)
    rewrite(tmp_path, lambda name: None if name == lost else name)
    with pytest.raises(PlanError, match=rf"MISSING_TENSOR.*{named}"):
        load_model(tmp_path, device="cpu")


def test_a_classifier_is_not_taken_for_an_encoder(tmp_path: Path) -> None:
    """A head that no skip rule names is unexpected, so a classifier's weights are never dropped."""
    make(*configured("bert"), tmp_path)
    rewrite(tmp_path, lambda name: "classifier.weight" if name == "pooler.dense.weight" else name)
    with pytest.raises(PlanError, match=r"UNEXPECTED_TENSOR.*classifier\.weight"):
        load_model(tmp_path, device="cpu")


def test_bfloat16(tmp_path: Path) -> None:
    """A bfloat16 encoder stays bfloat16 and agrees by cosine above 0.999."""
    reference = make(*configured("bert"), tmp_path, dtype=torch.bfloat16)
    model = load_model(tmp_path, device="cpu").model
    ids, mask = inputs()
    with torch.inference_mode():
        ours, theirs = model(ids, mask), reference(ids, attention_mask=mask).last_hidden_state
    assert ours.dtype == torch.bfloat16
    assert closeness(ours[mask.bool()], theirs[mask.bool()]) > 0.999


@pytest.mark.parametrize(
    ("variant", "change", "word"),
    [
        ("bert", {"input_ids": torch.zeros(1, 65, dtype=torch.int64)}, "positions"),
        ("roberta", {"input_ids": torch.full((1, 39), 5)}, "positions"),
        ("bert", {"token_type_ids": torch.full((2, 24), 2)}, "token_type_ids"),
        ("bert", {"token_type_ids": torch.zeros(2, 3, dtype=torch.int64)}, "token_type_ids"),
        ("bert", {"attention_mask": torch.ones(2, 3, dtype=torch.int64)}, "attention_mask"),
        ("bert", {"input_ids": torch.full((2, 24), 101)}, "input_ids"),
    ],
)
def test_bad_inputs_are_refused(variant: str, change: dict[str, torch.Tensor], word: str, tmp_path: Path) -> None:
    """The error names the argument."""
    make(*configured(variant), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids, _ = inputs()
    with pytest.raises(ForwardError, match=word):
        model(**{"input_ids": ids, **change})


def test_padded_roberta_fills_all_positions(tmp_path: Path) -> None:
    """Padding takes no position: 38 real tokens fit 40 positions, however much padding follows."""
    reference = make(*configured("roberta"), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids = torch.full((1, 40), 5)
    ids[:, 38:] = 1
    mask = (ids != 1).long()
    with torch.inference_mode():
        assert distance(model(ids, mask)[:, :38], reference(ids, attention_mask=mask).last_hidden_state[:, :38]) < 1e-4


def test_pooling_without_a_pooler(tmp_path: Path) -> None:
    """The pooler of a checkpoint without one is refused with what can be had; the mean is that of real tokens."""
    make(*configured("bert-masked-lm"), tmp_path)
    model = load_model(tmp_path, device="cpu").model
    ids, mask = inputs()
    with torch.inference_mode():
        hidden = model(ids, mask)
    with pytest.raises(ForwardError, match="mean, cls"):
        model.pool(hidden)
    assert distance(model.pool(hidden, mask, mode="mean")[1], hidden[1, :REAL].mean(0)) < 1e-5


def test_minilm_embeds_like_transformers(minilm: Path) -> None:
    """A real encoder: hidden states, pooler and mean embeddings equal those of transformers."""
    from transformers import AutoModel, AutoTokenizer

    texts = ["A man is eating food.", "Somebody eats.", "The new movie is awesome, and rather long."]
    batch = AutoTokenizer.from_pretrained(minilm)(texts, padding=True, return_tensors="pt")
    model = load_model(minilm, device="cpu").model
    mask = batch["attention_mask"]
    with torch.inference_mode():
        ours, theirs = model(**batch), AutoModel.from_pretrained(minilm)(**batch)
        real = mask.bool()
        assert distance(ours[real], theirs.last_hidden_state[real]) < 1e-4
        assert distance(model.pool(ours), theirs.pooler_output) < 1e-4
        mean = (theirs.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        assert distance(model.pool(ours, mask, "mean"), mean) < 1e-4
