"""Embeddings equal those of transformers, pooled as sentence-transformers' documentation says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from rtp_llm import load_model
from rtp_llm.cli import main
from rtp_llm.runtime.embedding import BATCH, cosines, embed_texts, max_tokens
from rtp_llm.runtime.pooling import Recipe, read_recipe
from rtp_llm.runtime.tokenizer import load_tokenizer

TEXTS = [
    "A man is eating food.",
    "A man is having a meal.",
    "The sky is blue today, and the sentence is longer than the others so that padding matters.",
    "",
    "word " * 400,
]


def reference(directory: Path, texts: list[str], mode: str, length: int) -> torch.Tensor:
    """Vectors by transformers, one text at a time, so that nothing depends on padding."""
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModel.from_pretrained(directory)
    pools = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "max": lambda h: h.amax(0), "lasttoken": lambda h: h[-1]}
    vectors = []
    with torch.inference_mode():
        for text in texts:
            encoded = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
            vectors.append(pools[mode](model(**encoded).last_hidden_state[0]))
    return torch.stack(vectors)


def test_minilm_equals_transformers(minilm: Path) -> None:
    """The checkpoint's own recipe: mean, normalised, 256 tokens; long texts are cut where its files say."""
    recipe, tokenizer = read_recipe(minilm), load_tokenizer(minilm)
    assert recipe == Recipe("mean", normalize=True, max_seq_length=256)
    found = embed_texts(load_model(minilm, device="cpu").model, tokenizer, recipe, TEXTS)
    wanted = torch.nn.functional.normalize(reference(minilm, TEXTS, "mean", 256), dim=-1)
    assert found.dtype == torch.float32 and found.shape == (len(TEXTS), 384)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mode", ["cls", "max", "lasttoken"])
def test_modes_on_padded_batches(minilm: Path, mode: str) -> None:
    """Padding never takes part, whatever the mode; without normalisation lengths are the model's."""
    texts = TEXTS[:4]
    recipe = Recipe(mode, max_seq_length=128)
    found = embed_texts(load_model(minilm, device="cpu").model, load_tokenizer(minilm), recipe, texts)
    torch.testing.assert_close(found, reference(minilm, texts, mode, 128), atol=2e-4, rtol=0)


def test_prompt_lower_case_and_batches(minilm: Path) -> None:
    """A recipe's prompt and lower case are applied to each text, and more texts than a batch keep their order."""
    model, tokenizer = load_model(minilm, device="cpu").model, load_tokenizer(minilm)
    texts = [f"Number {i}" for i in range(BATCH + 3)]
    plain = embed_texts(model, tokenizer, Recipe(), [f"query: {text}".lower() for text in texts])
    torch.testing.assert_close(embed_texts(model, tokenizer, Recipe(lower_case=True, prompt="query: "), texts), plain)
    torch.testing.assert_close(
        plain[BATCH], embed_texts(model, tokenizer, Recipe(), [f"query: {texts[BATCH]}".lower()])[0], atol=2e-5, rtol=0
    )


def test_texts_are_cut_at_the_models_positions(minilm: Path) -> None:
    """Without a greatest length in the files, the model's positions bound a text, and its last token may use them all."""
    model, tokenizer = load_model(minilm, device="cpu").model, load_tokenizer(minilm)
    tokenizer.model_max_length = 10**30
    assert max_tokens(model, tokenizer, Recipe()) == 512
    model.embed.padding_id = 1  # RoBERTa counts positions from behind the padding token
    assert max_tokens(model, tokenizer, Recipe()) == 510
    model.embed.padding_id = None
    assert embed_texts(model, tokenizer, Recipe(), ["word " * 2000]).isfinite().all()


def test_cosines() -> None:
    """Lengths do not matter, and a vector of zeros is no division by zero."""
    found = cosines(torch.tensor([[2.0, 0.0], [0.0, 3.0], [5.0, 5.0], [0.0, 0.0]]))
    half = 0.5**0.5
    torch.testing.assert_close(found, torch.tensor([[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0.0]]))


def test_embed_command(minilm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A paraphrase is nearer than an unrelated sentence; the document holds the vectors, the text the cosines."""
    arguments = ["embed", str(minilm), "--device", "cpu", *(part for text in TEXTS[:3] for part in ("--text", text))]
    assert main([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    vectors = torch.tensor(document["embeddings"])
    torch.testing.assert_close(torch.tensor(document["cosines"]), cosines(vectors))
    assert (document["dimension"], document["pooling"], document["normalized"], document["max_seq_length"]) == (384, "mean", True, 256)
    assert document["cosines"][0][1] > 0.7 > 0.3 > document["cosines"][0][2]
    assert main(arguments) == 0
    assert f"{document['cosines'][0][1]:.4f}" in capsys.readouterr().out


def test_embed_refuses_before_it_loads(minilm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pooling that is not there is an error that comes before the weights."""
    copy = tmp_path / "copy"
    shutil.copytree(minilm, copy)
    (copy / "1_Pooling" / "config.json").write_text('{"pooling_mode": "weightedmean"}')
    assert main(["embed", str(copy), "--text", "x"]) == 2
    captured = capsys.readouterr()
    assert "weightedmean" in captured.err and "preflight" not in captured.err and captured.out == ""
