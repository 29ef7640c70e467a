"""sentence-transformers' files: followed where we can, refused where we cannot, never half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rtp_llm.errors import ConfigError, RtpLlmError
from rtp_llm.runtime.pooling import Recipe, read_recipe

_TYPE = "sentence_transformers.models."
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{_TYPE}Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{_TYPE}Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{_TYPE}Normalize"},
]
FLAGS = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def flags(*on: str) -> dict[str, bool]:
    """The older spelling of a pooling configuration."""
    return {f"pooling_mode_{name}": name in on for name in FLAGS}


def write(directory: Path, **files: Any) -> Path:
    names = {
        "modules": "modules.json",
        "pooling": "1_Pooling/config.json",
        "bert": "sentence_bert_config.json",
        "texts": "config_sentence_transformers.json",
    }
    for name, content in files.items():
        path = directory / names[name]
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def refused(directory: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_recipe(directory)
    assert all(p.code == "BAD_POOLING" and p.file and p.expected and p.actual for p in caught.value.problems)
    return caught.value


@pytest.mark.parametrize(
    ("files", "recipe"),
    [
        ({}, Recipe()),
        ({"modules": MODULES, "pooling": flags("mean_tokens")}, Recipe("mean", normalize=True)),
        ({"modules": MODULES[:2], "pooling": flags("cls_token")}, Recipe("cls")),
        ({"modules": MODULES[:2], "pooling": flags("max_tokens")}, Recipe("max")),
        ({"modules": MODULES[:2], "pooling": flags("lasttoken")}, Recipe("lasttoken")),
        ({"modules": MODULES[:2], "pooling": {"pooling_mode": "cls", "embedding_dimension": 3}}, Recipe("cls")),
        ({"modules": MODULES[:2], "pooling": {"pooling_mode": ["cls"], **flags("mean_tokens")}}, Recipe("cls")),
        ({"modules": MODULES[:2], "pooling": {}}, Recipe("mean")),
        ({"modules": [MODULES[0], MODULES[2]]}, Recipe("mean", normalize=True)),
        ({"pooling": flags("cls_token")}, Recipe("cls")),
        ({"bert": {"max_seq_length": 256, "do_lower_case": True}}, Recipe(max_seq_length=256, lower_case=True)),
        ({"texts": {"prompts": {"query": "q: "}, "default_prompt_name": "query"}}, Recipe(prompt="q: ")),
        ({"texts": {"prompts": {"query": "q: "}, "default_prompt_name": None}}, Recipe()),
    ],
)
def test_recipes(files: dict[str, Any], recipe: Recipe, tmp_path: Path) -> None:
    """Old and new spellings; without files the mean, as sentence-transformers does it."""
    assert read_recipe(write(tmp_path, **files)) == recipe


@pytest.mark.parametrize(
    ("files", "word"),
    [
        ({"modules": MODULES[:2], "pooling": flags("cls_token", "mean_tokens")}, "['cls', 'mean']"),
        ({"modules": MODULES[:2], "pooling": {"pooling_mode": ["cls", "mean"]}}, "['cls', 'mean']"),
        ({"modules": MODULES[:2], "pooling": flags("weightedmean_tokens")}, "weightedmean"),
        ({"modules": MODULES[:2], "pooling": flags("mean_sqrt_len_tokens")}, "mean_sqrt_len_tokens"),
        ({"modules": MODULES[:2], "pooling": {"pooling_mode_secret": True}}, "pooling_mode_secret"),
        ({"modules": MODULES[:2], "pooling": {"pooling_mode": 5}}, "5"),
        ({"modules": [*MODULES, {"path": "3_Dense", "type": f"{_TYPE}Dense"}]}, "Dense"),
        ({"modules": [MODULES[0], {"path": "1_WordWeights", "type": f"{_TYPE}WordWeights"}]}, "WordWeights"),
        ({"modules": [MODULES[0], MODULES[1] | {"path": "../1_Pooling"}]}, "../1_Pooling"),
        ({"modules": [MODULES[0], MODULES[1] | {"path": "/etc"}]}, "/etc"),
        ({"modules": [5]}, "5"),
        ({"modules": {"type": 1}}, "type"),
        ({"bert": {"max_seq_length": "256"}}, "'256'"),
        ({"bert": {"max_seq_length": 0}}, "0"),
        ({"bert": {"do_lower_case": "yes"}}, "'yes'"),
        ({"texts": {"prompts": {}, "default_prompt_name": "query"}}, "'query'"),
        (
            {"pooling": {"include_prompt": False}, "texts": {"prompts": {"q": "q: "}, "default_prompt_name": "q"}},
            "include_prompt",
        ),
    ],
)
def test_what_is_not_there_is_refused(files: dict[str, Any], word: str, tmp_path: Path) -> None:
    """A module or mode left out would give other vectors than the model's author meant, without a word."""
    assert word in str(refused(write(tmp_path, **files)))


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    """Four files, four findings."""
    files = {"modules": [*MODULES, {"path": "3_Dense", "type": f"{_TYPE}Dense"}], "pooling": flags("weightedmean_tokens")}
    error = refused(write(tmp_path, **files, bert={"max_seq_length": -1}, texts={"default_prompt_name": "x"}))
    assert len(error.problems) == 4


@pytest.mark.parametrize("name", ["modules", "pooling", "bert", "texts"])
@pytest.mark.parametrize("content", ["", "{", "[1,", "\x00", "NaN"])
def test_broken_files_are_errors_of_the_checkpoint(name: str, content: str, tmp_path: Path) -> None:
    """A file that is there and is not JSON is never taken for absent."""
    with pytest.raises(RtpLlmError):
        read_recipe(write(tmp_path, **{name: content}))
