"""Several prompts at once give the answers that each gives alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rtp_llm import LoadConfig, load_model
from rtp_llm.cli import main
from rtp_llm.cli.commands.generate import _Arguments, _prompts
from rtp_llm.layers.cache import CacheSize
from rtp_llm.layers.faults import ForwardError
from rtp_llm.runtime.generation import Answer, Generation, GenerationRequest, cache_size, generate, generate_all
from rtp_llm.runtime.sampling import Sampling
from rtp_llm.runtime.tokenizer import TextStream, encode_prompt, load_tokenizer
from tests.support.ranks import ANSWER_IMPORTS, run_commands, run_ranks
from tests.support.tiny import save_tiny_llama

PROMPTS = [(5, 17, 99, 3), (2,), tuple(range(40, 60)), (1, 2, 3, 4), (130, 7, 7), (9, 8, 7, 6)]
GREEDY, DRAWN = Sampling(), Sampling(1.2, top_k=20, top_p=0.9, seed=11)
QUESTIONS = ["What is the capital of France?", "Name a colour.", "What is two plus two?"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), initializer_range=0.5)


@pytest.fixture(scope="module")
def model(tiny: Path) -> Any:
    return load_model(tiny, device="cpu").model


def requests(sampling: Sampling = GREEDY) -> list[GenerationRequest]:
    """Prompts of five lengths, answers of six."""
    return [GenerationRequest(prompt, 4 + 5 * i, sampling) for i, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "sampled"])
def test_answers_are_those_of_each_alone(batch_size: int, sampling: Sampling, model: Any) -> None:
    """However many run at a time, and whoever a cache row belonged to before; greedy or drawn."""
    alone = [generate_all(model, [request])[0] for request in requests(sampling)]
    assert generate_all(model, requests(sampling), batch_size=batch_size) == alone
    assert [len(answer.ids) for answer in alone] == [4, 9, 14, 19, 24, 29]
    assert len({answer.ids for answer in alone}) == len(alone)


def test_end_tokens_end_one_sequence_and_no_other(model: Any) -> None:
    """A sequence that has ended makes room; the others go on."""
    plain = generate_all(model, requests())
    stop = plain[2].ids[3]
    expected = []
    for answer in plain:
        cut = answer.ids.index(stop) if stop in answer.ids else None
        expected.append(answer if cut is None else Answer(answer.ids[:cut], "stop"))
    assert generate_all(model, requests(), stop_ids={stop}, batch_size=3) == expected
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}


def test_events_tell_each_token_once_and_in_order(model: Any) -> None:
    """Tokens come as they are found, an answer last; pages and cache rows are all free in the end; times are split."""
    asked = requests()
    cache = model.cache_of(cache_size(asked, 3))
    generation = Generation(model, asked, cache)
    told: dict[int, list[int]] = {i: [] for i in range(len(asked))}
    answers = {}
    for event in generation.events():
        assert event.index not in answers
        if event.answer is not None:
            answers[event.index] = event.answer
        else:
            assert event.token is not None
            told[event.index].append(event.token)
    assert {i: answer.ids for i, answer in answers.items()} == {i: tuple(ids) for i, ids in told.items()}
    assert (cache.free_rows, cache.free_pages) == (3, cache.size.pages)
    assert generation.prefill.tokens == sum(map(len, PROMPTS))
    assert generation.decode.tokens == sum(len(a.ids) for a in answers.values()) - len(asked)
    assert generation.prefill.per_second and generation.decode.per_second


def test_who_stops_early_leaves_an_empty_cache(model: Any) -> None:
    """Slots and pages are free again, for whoever comes next."""
    asked = requests()
    cache = model.cache_of(cache_size(asked, 3))
    events = Generation(model, asked, cache).events()
    for _ in range(8):
        next(events)
    assert cache.free_rows < 3
    events.close()  # type: ignore[attr-defined]
    assert (cache.free_rows, cache.free_pages) == (3, cache.size.pages)


def test_few_pages_make_prompts_wait(model: Any) -> None:
    """A cache that holds fewer sequences than it has cache rows runs as many as there are pages for; one that cannot hold a request
    alone refuses it."""
    asked = requests()
    scarce = CacheSize(rows=6, pages=4, max_length=64)
    answers = {e.index: e.answer for e in Generation(model, asked, model.cache_of(scarce)).events() if e.answer is not None}
    assert [answers[i] for i in range(len(asked))] == generate_all(model, asked)
    with pytest.raises(ForwardError, match=r"NO_PAGES.*3 free pages.*2 of 2"):
        list(Generation(model, [GenerationRequest((1,) * 20, 20)], model.cache_of(CacheSize(1, 2, 64))).events())


def test_the_cache_is_as_large_as_the_longest_need() -> None:
    """The last new token is never fed back; cache rows are no more than there are requests."""
    asked = [GenerationRequest((1,) * 10, 7), GenerationRequest((1,) * 20, 13), GenerationRequest((1,), 1)]
    assert cache_size(asked, 2) == CacheSize(2, 1 + 2, 32)
    assert cache_size(asked, 99) == CacheSize(3, 1 + 2 + 1, 32)


def answers_on_rank(folder: str) -> list[tuple[tuple[int, ...], ...]]:
    """Greedy and drawn answers of one rank."""
    model = load_model(folder, device="cpu").model
    return [tuple(answer.ids for answer in generate_all(model, requests(way), batch_size=4)) for way in (GREEDY, DRAWN)]


def test_two_ranks_give_the_same_answers(tiny: Path, model: Any) -> None:
    """Each rank draws the same tokens, and they are those of one rank alone."""
    results = [result.value for result in run_ranks(2, answers_on_rank, str(tiny), timeout=120)]
    assert results[0] == results[1]
    assert results[0] == [tuple(answer.ids for answer in generate_all(model, requests(way))) for way in (GREEDY, DRAWN)]


def test_smollm2_says_what_transformers_says(smollm2: Path) -> None:
    """In float32, each of 128 greedy tokens is the one that transformers finds likeliest behind those before it; eight prompts at
    once give what each gives alone."""
    tokenizer = load_tokenizer(smollm2)
    ids = encode_prompt(tokenizer, "The history of the lighthouse begins", raw=True)
    model = load_model(smollm2, device="cpu", load=LoadConfig(dtype="float32")).model
    answer = list(generate(model, ids, 128).ids)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids + answer])).logits[0]
    assert answer == logits[len(ids) - 1 : -1].argmax(-1).tolist()
    subjects = ("rivers", "the moon", "bread", "an old clock", "x", "music and why people like it", "the sea", "seven hills")
    asked = [GenerationRequest(tuple(encode_prompt(tokenizer, f"About {subject}:", raw=True)), 6) for subject in subjects]
    assert generate_all(model, asked, batch_size=8) == generate_all(model, asked, batch_size=1)


def test_text_streams_say_the_whole_text(smollm2: Path) -> None:
    """Pieces join to what decoding at once gives, though characters are split over tokens; nothing incomplete is shown."""
    tokenizer = load_tokenizer(smollm2)
    for text in ("Plain words, and a line.\n\n  Indented.", "naïve 日本語 🙂👩‍🚀 ok", "  leading"):
        ids = tokenizer(text)["input_ids"]
        stream = TextStream(tokenizer)
        pieces = [stream.add(i) for i in ids]
        assert "".join(pieces) + stream.end() == tokenizer.decode(ids) == text
        assert not any("\ufffd" in piece for piece in pieces)
    cut = tokenizer("🙂")["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert [stream.add(i) for i in cut] == [""] * len(cut) and stream.end() == tokenizer.decode(cut)


def test_the_command_takes_many_prompts(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One entry for each prompt, in order, of flags and of a file; the streamed text and the text at the end are the same."""
    (tmp_path / "prompts.txt").write_text(f"{QUESTIONS[1]}\n\n{QUESTIONS[2]}\n")
    command = ["generate", str(smollm2), "--prompt", QUESTIONS[0], "--prompts_file", str(tmp_path / "prompts.txt"), "--device", "cpu"]
    command += ["--max_new_tokens", "12", "--batch_size", "2"]
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in document["answers"]] == QUESTIONS
    assert document["text"] == document["answers"][0]["text"]
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text()
    assert all(f"`{name}`" in page for entry in (document, document["answers"][0], document["decode"]) for name in entry)
    shown = []
    for flag in ("--stream", "--no_stream"):
        assert main([*command, flag]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0] == "".join(f"--- {i}: {e['prompt']}\n{e['text']}\n" for i, e in enumerate(document["answers"], 1))


def test_a_line_is_a_prompt(tmp_path: Path) -> None:
    """Whatever an editor on another system writes before and behind it; what separates lines only in print is part of the prompt."""
    (tmp_path / "prompts.txt").write_bytes("\ufeffone\r\ntwo\u2028\f\x85lines\r\n\r\n".encode())
    assert _prompts(_Arguments(("zero",), str(tmp_path / "prompts.txt"), 1, True, {})) == ("zero", "one", "two\u2028\f\x85lines")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ([], "--prompt"),
        (["--prompt", "x", "--top_p", "0"], "top_p"),
        (["--prompt", "x", "--temperature", "-1"], "temperature"),
        (["--prompt", "x", "--seed", "-1"], "seed"),
        (["--prompt", "x", "--batch_size", "0"], "batch_size"),
        (["--prompt", "x", "--top_k", "4"], "without a temperature"),
        (["--prompts_file", "absent.txt"], "absent.txt"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: list[str], word: str, smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is loaded, with exit code 2."""
    assert main(["generate", str(smollm2), *flags]) == 2
    assert word in capsys.readouterr().err


def test_every_bad_prompt_is_named(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts that are too long, all of them, by number; and a file that is no text."""
    (tmp_path / "long.txt").write_text("short\n" + "word " * 9000 + "\n" + "word " * 9001)
    assert main(["generate", str(smollm2), "--raw", "--prompts_file", str(tmp_path / "long.txt")]) == 2
    said = capsys.readouterr().err
    assert "prompt 2: the prompt is too long" in said and "prompt 3: the prompt is too long" in said and "prompt 1" not in said
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    assert main(["generate", str(smollm2), "--raw", "--prompts_file", str(tmp_path / "bytes.txt")]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_bad_prompt_of_one_rank_is_every_ranks_error(smollm2: Path, tmp_path: Path) -> None:
    """Nobody loads while another rank has nothing to say; rank 0 tells what was wrong elsewhere."""
    (tmp_path / "blank.txt").write_text("\n")
    command = ["-m", "rtp_llm.cli", "generate", str(smollm2), "--device", "cpu"]
    results = run_commands(
        [[*command, "--prompt", "x"], [*command, "--prompts_file", str(tmp_path / "blank.txt")]],
        timeout=120,
        check=False,
        imports=ANSWER_IMPORTS,
    )
    assert [result.returncode for result in results] == [2, 2]
    assert "no prompts" in results[0].stderr and "rank 1" in results[0].stderr
