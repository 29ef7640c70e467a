"""Chat templates give what transformers gives, and whatever a hostile one does, it comes to an end."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rtp_llm.cli import main
from rtp_llm.errors import ConfigError
from rtp_llm.runtime.chat import chat_texts
from rtp_llm.runtime.tokenizer import encode_prompt, encode_text, load_tokenizer, prompt_texts
from tests.support.paths import ROOT
from tests.support.tiny import save_tiny_llama

PROMPTS = ["What is the capital of France?", "", "naïve 日本語 🙂 <|im_end|>\n\x00", "{{ messages }}"]

#: Loops whose product never ends, work that is a single call, and texts that fill memory or only the tokenizer's time.
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}BODY{% endfor %}{% endfor %}{% endfor %}"
HOSTILE = {
    "loops": (LOOPS.replace("BODY", ""), "processor time"),
    "loops that write": (LOOPS.replace("BODY", "{{ messages }}"), "processor time|MemoryError"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "processor time"),
    "memory": ("{{ 'x' * 10 ** 11 }}", "MemoryError"),
    "a long text": ("{{ 'x' * 10 ** 8 }}", "100000000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "brackets": ("{{ " + "(" * 100_000 + " }}", "RecursionError|process ended"),
}


@pytest.fixture
def chatty(smollm2: Path, tmp_path: Path) -> Path:
    """A small Llama with SmolLM2's tokenizer, for a template of the test's own."""
    save_tiny_llama(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path)
    return tmp_path


def by_transformers(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)["input_ids"]
    return [int(i) for i in ids]


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ bos_token }}{% generation %}{{ messages | tojson }}{% endgeneration %}{{ 'A:' if add_generation_prompt }}{{ eos_token }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}"
        "{{ m.role }} {{ m['content'] | trim }} {{ ns.n }}{% endfor %}{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ strftime_now('%Y') }}",
    ],
    ids=["its own", "special tokens", "statements"],
)
def test_prompts_are_those_of_transformers(chatty: Path, smollm2: Path, template: str | None) -> None:
    """All prompts in one go, token by token; user text that looks like a template or a special token is treated as there."""
    if template is None:
        shutil.copy(smollm2 / "chat_template.jinja", chatty)
    else:
        (chatty / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(chatty)
    texts = prompt_texts(tokenizer, PROMPTS, raw=False)
    assert [encode_text(tokenizer, text, raw=False) for text in texts] == [by_transformers(tokenizer, prompt) for prompt in PROMPTS]


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second of processor time, so that what has no end ends soon."""
    monkeypatch.setattr("rtp_llm.runtime.chat._SECONDS", 0.5)


@pytest.mark.parametrize("hostile", sorted(HOSTILE))
def test_a_hostile_template_comes_to_an_end(hostile: str, request: pytest.FixtureRequest) -> None:
    """It is an error that says what it took, and this process has neither waited for it nor given it memory."""
    template, words = HOSTILE[hostile]
    if words.startswith("processor time"):  # what ends in another way has all the time that it may take
        request.getfixturevalue("little_time")
    with pytest.raises(ConfigError, match=words) as caught:
        chat_texts(template, {}, PROMPTS)
    (problem,) = caught.value.problems
    assert problem.code == "BAD_CHAT_TEMPLATE" and problem.fix == "use --raw"


@pytest.mark.usefixtures("little_time")
def test_its_time_ends_where_nobody_wants_to_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ignores SIGXCPU, as under some batch systems: the other one would do so too, and run until all patience ends."""
    monkeypatch.setattr("rtp_llm.runtime.chat._PATIENCE_S", 30.0)
    before = signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    try:
        with pytest.raises(ConfigError, match="processor time"):
            chat_texts(HOSTILE["a power"][0], {}, PROMPTS)
    finally:
        signal.signal(signal.SIGXCPU, before)


def test_the_command_says_so(chatty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before weights are looked at: exit code 2 and one problem."""
    (chatty / "chat_template.jinja").write_text(HOSTILE["loops"][0])
    assert main(["generate", str(chatty), "--prompt", "x", "--prompt", "y", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["error"]["problems"]
    assert problem["fault"] == "BAD_CHAT_TEMPLATE" and "processor time" in problem["actual"]


def test_a_template_of_another_name_is_not_taken(chatty: Path) -> None:
    """Several templates, none of them the default: no guess which one is meant."""
    tokenizer = load_tokenizer(chatty)
    tokenizer.chat_template = {"tool_use": "{{ 1 }}", "rag": "{{ 2 }}"}
    with pytest.raises(ConfigError, match="NO_CHAT_TEMPLATE.*--raw"):
        encode_prompt(tokenizer, "x", raw=False)


def test_it_finds_this_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other process has this one's path, wherever it was started and however the path was made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(sys, "path", [*sys.path, ""])
    assert chat_texts("{{ messages[0].content }}", {}, ["hello"]) == ["hello"]


def test_it_runs_no_file_of_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The working directory may be the checkpoint: its Python files are found only where this process would find them."""
    (tmp_path / "rtp_llm").mkdir()
    for name in ("jinja2.py", "json.py", "sitecustomize.py", "transformers.py", "rtp_llm/__init__.py"):
        (tmp_path / name).write_text("raise SystemExit('a file of the checkpoint ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(ROOT), *(entry for entry in sys.path if entry)])
    assert chat_texts("{{ messages[0].content }}", {}, ["hello"]) == ["hello"]
