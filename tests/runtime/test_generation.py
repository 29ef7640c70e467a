"""Greedy generation equals transformers', ends where it should, and a real model answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rtp_llm import load_model
from rtp_llm.cli import main
from rtp_llm.errors import ConfigError
from rtp_llm.runtime.generation import Answer, generate
from rtp_llm.runtime.limits import Limits, generation_limits, require_kind, stop_tokens
from rtp_llm.runtime.tokenizer import encode_prompt, load_tokenizer
from tests.support.ranks import ANSWER_IMPORTS, run_commands
from tests.support.tiny import save_tiny_llama

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
PROMPT = [5, 17, 99, 3]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # A larger spread of random weights than the usual 0.02, so that the most likely token is not always the same one.
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), initializer_range=0.5)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny, device="cpu").model


def test_tokens_equal_transformers(tiny: Path, model: Any) -> None:
    """Forty greedy tokens with the KV cache are those of ``transformers.generate``."""
    reference = AutoModelForCausalLM.from_pretrained(tiny)
    wanted = reference.generate(torch.tensor([PROMPT]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    answer = generate(model, PROMPT, 40)
    assert list(answer.ids) == wanted[0, len(PROMPT) :].tolist() and len(set(answer.ids)) > 5
    assert answer.finish_reason == "length"


def test_an_end_token_ends_the_answer_and_is_not_part_of_it(model: Any) -> None:
    """The first of several end tokens counts, and one that comes first leaves an empty answer."""
    ids = generate(model, PROMPT, 10).ids
    stop = next(i for i in range(2, 10) if ids[i] not in ids[:i])
    assert generate(model, PROMPT, 10, {ids[stop], 130 if ids[stop] != 130 else 129}) == Answer(ids[:stop], "stop")
    assert generate(model, PROMPT, 10, {ids[0]}) == Answer((), "stop")
    assert generate(model, PROMPT, 1) == Answer(ids[:1], "length")


def test_limits() -> None:
    """A prompt needs room for an answer and ids that the model has; an answer ends where the positions end."""
    limits = Limits(context=8, vocabulary=100)
    limits.check([99] * 7)
    assert limits.room(7, 50) == 1 and limits.room(3, 2) == 2 and Limits(None, None).room(7, 50) == 50
    Limits(None, None).check([10**9] * 1000)
    with pytest.raises(ConfigError) as caught:
        limits.check([100] * 8)
    assert len(caught.value.problems) == 2


def test_limits_and_kind_come_from_config_json(tiny: Path, minilm: Path) -> None:
    """What the checkpoint says, known before it is loaded."""
    assert generation_limits(tiny) == Limits(context=64, vocabulary=131)
    require_kind(tiny, "causal")
    require_kind(minilm, "encoder")
    for directory, kind, command in ((tiny, "encoder", "rtp-llm generate"), (minilm, "causal", "rtp-llm embed")):
        with pytest.raises(ConfigError, match=command):
            require_kind(directory, kind)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "wanted"),
    [
        (None, None, None, set()),
        (None, 2, None, {2}),
        ([1, 2], 3, 4, {1, 2, 3, 4}),
        (0, None, 0, {0}),
    ],
)
def test_every_file_may_name_end_tokens(generation: Any, config: Any, tokenizer: Any, wanted: set[int], tmp_path: Path) -> None:
    """A chat model's turn ends with another token than its texts: all that are named count."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"], "eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_tokens(tmp_path, tokenizer) == wanted


@pytest.mark.parametrize("bad", ["2", True, -1, [1, "2"], {"a": 1}, 2.0])
def test_end_tokens_that_are_none_are_refused(bad: Any, tmp_path: Path) -> None:
    """Generation would never stop, or stop at once; both files are named."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_text(json.dumps({"architectures": ["X"], "eos_token_id": bad}))
    with pytest.raises(ConfigError) as caught:
        stop_tokens(tmp_path, None)
    assert [p.file for p in caught.value.problems] == ["config.json", "generation_config.json"]


def test_smollm2_answers(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real checkpoint, through its chat template, says what it should; the document counts tokens."""
    assert main(["generate", str(smollm2), "--prompt", QUESTION, "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["text"], document["finish_reason"]) == (ANSWER, "stop")
    assert document["new_tokens"] == 7 and document["prompt_tokens"] > 20 and document["load"]["bytes_read"] > 200_000_000
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    assert all(f"`{name}`" in page for name in document)


def test_raw_prompts_are_continued(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--raw`` leaves the template away, and ``--max_new_tokens`` ends the answer."""
    arguments = ["generate", str(smollm2), "--raw", "--prompt", "1, 2, 3, 4, 5,", "--max_new_tokens", "6", "--device", "cpu", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"].startswith(" 6, 7") and (document["new_tokens"], document["finish_reason"]) == (6, "length")
    assert document["prompt_tokens"] == len(load_tokenizer(smollm2)("1, 2, 3, 4, 5,")["input_ids"])


def test_smollm2_on_three_ranks_says_the_same(smollm2: Path) -> None:
    """Nine heads and three KV heads over three processes; rank 0 alone prints."""
    command = ["-m", "rtp_llm.cli", "generate", str(smollm2), "--prompt", QUESTION, "--device", "cpu"]
    results = run_commands([command] * 3, timeout=120, imports=ANSWER_IMPORTS)
    assert [r.stdout for r in results] == [ANSWER + "\n", "", ""]


def test_a_checkpoint_without_a_chat_template_needs_raw(smollm2: Path, tmp_path: Path) -> None:
    """No template is invented."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="--raw"):
        encode_prompt(tokenizer, QUESTION, raw=False)
    assert encode_prompt(tokenizer, QUESTION, raw=True)
    with pytest.raises(ConfigError, match="no tokens"):
        encode_prompt(tokenizer, "", raw=True)


@pytest.mark.parametrize(
    "template", ["{{ messages[99].content }}", "{% if %}", "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", "{{ 1/0 }}"]
)
def test_a_broken_or_hostile_template_is_an_error(smollm2: Path, tmp_path: Path, template: str) -> None:
    """Templates are code from a checkpoint: they run in a sandbox, and what they raise is told."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match="chat template"):
        encode_prompt(load_tokenizer(tmp_path), QUESTION, raw=False)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer.json": "{"},
        {"tokenizer.json": "{}"},
        {"tokenizer.json": '{"version": "1.0", "model": {"type": "Nonsense"}}', "tokenizer_config.json": "{}"},
        {"tokenizer_config.json": "[]"},
        {
            "tokenizer_config.json": '{"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", null]}}',
            "evil.py": "raise SystemExit(99)",
        },
    ],
    ids=["absent", "not JSON", "empty", "unknown model", "not an object", "code"],
)
def test_a_tokenizer_that_cannot_be_used_is_an_error(files: dict[str, str], tmp_path: Path) -> None:
    """Whatever is wrong with its files, and above all where it would run code of the checkpoint."""
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.problems[0].code == "BAD_TOKENIZER"
