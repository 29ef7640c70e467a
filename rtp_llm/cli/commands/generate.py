"""``rtp-llm generate``: load a causal language model and let it answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rtp_llm.cli.options import LOADING, checkpoint_argument, common, output_of, setting_options
from rtp_llm.cli.output import Output, printable
from rtp_llm.cli.session import load_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rtp_llm.layers.cache import CacheSize
    from rtp_llm.parallel.world import World
    from rtp_llm.runtime.generation import Answer, Generation, GenerationRequest, Pace
    from rtp_llm.runtime.sampling import Sampling

_EXAMPLES = """\b
Examples:
  rtp-llm generate ./SmolLM2-135M-Instruct --prompt "What is the capital of France?"
  rtp-llm generate ./SmolLM2-135M --raw --prompt "Once upon a time" --max_new_tokens 50
  rtp-llm generate ./SmolLM2-135M-Instruct --prompts_file questions.txt --batch_size 16 --json
  rtp-llm generate ./SmolLM2-135M-Instruct --prompt "Tell me a story" --temperature 0.8 --top_p 0.95 --seed 7
  torchrun --nproc-per-node 3 -m rtp_llm.cli generate ./SmolLM2-135M-Instruct --prompt "Hello"
"""

#: The largest seed that generators take: rtp_llm.runtime.sampling.MOST_SEED, which cannot be imported without torch.
_MOST_SEED = 2**63 - 1
#: No decode step gets faster with more sequences.
_MOST_BATCH = 4096
#: Characters of a prompt shown above its answer, if there are several.
_TITLE = 72


@click.command(short_help="Generate text with a causal language model.", epilog=_EXAMPLES)
@checkpoint_argument
@click.option("--prompt", "prompts", multiple=True, help="A prompt; give the option once for each.")
@click.option(
    "--prompts_file", type=click.Path(exists=True, dir_okay=False), help="File with one prompt per line; they follow those of --prompt."
)
@click.option("--max_new_tokens", type=click.IntRange(1, 1_000_000), default=128, show_default=True, help="Most tokens of an answer.")
@click.option("--raw", is_flag=True, help="Use the prompt as it is, without the chat template.")
@click.option("--temperature", type=click.FloatRange(0, 100), default=0.0, show_default=True, help="Divide scores by this; 0 = greedy.")
@click.option("--top_k", type=click.IntRange(0), default=0, show_default=True, help="Sample from the K most likely tokens; 0 = all.")
@click.option(
    "--top_p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Sample from the fewest tokens that together have this probability.",
)
@click.option(
    "--seed", type=click.IntRange(0, _MOST_SEED), default=0, show_default=True, help="Random seed (each prompt has its own generator)."
)
@click.option("--batch_size", type=click.IntRange(1, _MOST_BATCH), default=8, show_default=True, help="Most sequences that run at a time.")
@click.option("--cuda_graphs/--no_cuda_graphs", default=True, help="Decode with CUDA graphs on a GPU.  [default: cuda_graphs]")
@click.option("--stream/--no_stream", default=None, help="Print text as it comes (default on a terminal).")
@setting_options(*LOADING)
@common
@click.pass_context
def generate(
    context: click.Context,
    /,
    checkpoint: str,
    prompts: tuple[str, ...],
    prompts_file: str | None,
    max_new_tokens: int,
    raw: bool,
    batch_size: int,
    cuda_graphs: bool,
    stream: bool | None,
    **flags: Any,
) -> int:
    """Generate text with the checkpoint directory CKPT, greedily unless there is a --temperature.

    Prompts go through the checkpoint's chat template; a checkpoint without one needs --raw. A sequence that has ended gives its
    place to the next prompt, and answers are printed in the order of the prompts.
    """
    if not prompts and prompts_file is None:
        raise click.UsageError("give --prompt or --prompts_file", context)
    arguments = _Arguments(
        prompts, prompts_file, max_new_tokens, raw, {name: flags.pop(name) for name in ("temperature", "top_k", "top_p", "seed")}
    )
    loaded, task = load_for(
        context, checkpoint, flags, lambda: _prepare(checkpoint, arguments), cache=lambda prepared: prepared.cache_size(batch_size)
    )

    from rtp_llm.runtime.generation import Generation
    from rtp_llm.runtime.graphs import decoding

    _agree(loaded.world, task, batch_size)
    output = output_of(context)
    model: Any = loaded.model
    cache = model.cache_of(task.cache_size(batch_size))
    way = decoding(model, cache, graphs=cuda_graphs, longest=max(request.max_new_tokens for request in task.requests))
    generation = Generation(model, task.requests, cache, stop_ids=task.stop_ids, decoder=way.decoder)
    shown = not output.json and (sys.stdout.isatty() if stream is None else stream)
    answers = _run(generation, task, _Printer(task, output) if shown else None)
    document = _document(task, answers, generation) | {"cuda_graphs": way.to_json(), "load": loaded.report.to_json()}
    output.emit(document, lambda: None if shown else _print(task, answers))
    graphs = f"CUDA graphs for batches of {', '.join(map(str, way.sizes))}" if way.sizes else f"no CUDA graphs: {way.reason}"
    output.note(f"prefill {_speed(generation.prefill)}; decode {_speed(generation.decode)}; {graphs}")
    return 0


@dataclass(frozen=True, slots=True)
class _Arguments:
    """What the flags say."""

    prompts: tuple[str, ...]
    prompts_file: str | None
    max_new_tokens: int
    raw: bool
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Task:
    """The requests, and when an answer ends."""

    tokenizer: PreTrainedTokenizerBase
    prompts: tuple[str, ...]
    requests: tuple[GenerationRequest, ...]
    stop_ids: frozenset[int]

    def cache_size(self, batch_size: int) -> CacheSize:
        from rtp_llm.runtime.generation import cache_size

        return cache_size(self.requests, batch_size)

    def text(self, answer: Answer) -> str:
        return str(self.tokenizer.decode(list(answer.ids), skip_special_tokens=True))

    def title(self, index: int) -> str:
        """A line above an answer, if there are several."""
        first = self.prompts[index].strip().partition("\n")[0]
        return f"--- {index + 1}: {printable(first[:_TITLE])}" if len(self.prompts) > 1 else ""


def _prepare(checkpoint: str, arguments: _Arguments) -> _Task:
    from rtp_llm.runtime.limits import generation_limits, require_kind, stop_tokens
    from rtp_llm.runtime.sampling import Sampling
    from rtp_llm.runtime.tokenizer import load_tokenizer

    require_kind(checkpoint, "causal")
    sampling = Sampling(**arguments.sampling)
    prompts = _prompts(arguments)
    tokenizer = load_tokenizer(checkpoint)
    requests = _requests(prompts, tokenizer, arguments, sampling, generation_limits(checkpoint))
    return _Task(tokenizer, prompts, requests, stop_tokens(checkpoint, tokenizer.eos_token_id))


def _prompts(arguments: _Arguments) -> tuple[str, ...]:
    """All prompts in order; blank lines of a file do not count."""
    from rtp_llm.errors import ConfigError, Problem
    from rtp_llm.runtime.faults import RuntimeFault

    if arguments.prompts_file is None:
        return arguments.prompts
    try:
        # Not splitlines(), which also splits at form feeds and line separators within a prompt.
        lines = Path(arguments.prompts_file).read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        problem = Problem(
            RuntimeFault.BAD_PROMPT, "the prompts are not text", file=arguments.prompts_file, expected="UTF-8", actual=str(error)
        )
        raise ConfigError(problem) from error
    found = (*arguments.prompts, *(line for line in lines if line.strip()))
    if not found:
        problem = Problem(RuntimeFault.BAD_PROMPT, "no prompts", file=arguments.prompts_file, expected="one a line", actual="blank lines")
        raise ConfigError(problem)
    return found


def _requests(
    prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase, arguments: _Arguments, sampling: Sampling, limits: Any
) -> tuple[GenerationRequest, ...]:
    """A request for each prompt.

    Raises:
        ConfigError: with all problems of all prompts.
    """
    from rtp_llm.errors import ConfigError, Problem
    from rtp_llm.runtime.generation import GenerationRequest
    from rtp_llm.runtime.tokenizer import encode_text, prompt_texts

    requests: list[GenerationRequest] = []
    problems: list[Problem] = []
    for number, text in enumerate(prompt_texts(tokenizer, prompts, raw=arguments.raw), 1):
        try:
            ids = encode_text(tokenizer, text, raw=arguments.raw)
            limits.check(ids)
            requests.append(GenerationRequest(tuple(ids), limits.room(len(ids), arguments.max_new_tokens), sampling))
        except ConfigError as error:
            where = f"prompt {number}: " if len(prompts) > 1 else ""
            problems += [replace(problem, what=where + problem.what) for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return tuple(requests)


def _agree(world: World, task: _Task, batch_size: int) -> None:
    """Checks that all ranks have the same requests: a template may contain the time, and hosts have their own files.

    Raises:
        ParallelError: the same on every rank.
    """
    from rtp_llm.parallel.world import agree
    from rtp_llm.plan.plan import digest

    lines = [f"{batch_size} sequences at a time, end tokens {sorted(task.stop_ids)}"]
    for number, request in enumerate(task.requests, 1):
        ids = digest(map(str, request.prompt_ids))
        summary = f"{len(request.prompt_ids)} tokens of digest {ids[:12]}, {request.max_new_tokens} more, {request.sampling}"
        lines.append(f"prompt {number}: {summary}")
    with world.watch(together=False) as watch:
        agree(
            watch,
            digest(iter(lines)),
            lambda: iter(lines),
            what="its prompts and how to answer them are not those of rank 0",
            fix="give every rank the same flags and files; --raw where the chat template tells the time",
        )


def _run(generation: Generation, task: _Task, printer: _Printer | None) -> list[Answer]:
    answers: dict[int, Answer] = {}
    for event in generation.events():
        if printer is not None:
            printer.take(event.index, event.token)
        if event.answer is not None:
            answers[event.index] = event.answer
    return [answers[index] for index in range(len(task.requests))]


class _Printer:
    """Prints text as it arrives, one answer at a time in the order of prompts; text of later answers is kept."""

    def __init__(self, task: _Task, output: Output) -> None:
        from rtp_llm.runtime.tokenizer import TextStream

        self._task, self._output = task, output
        self._streams = [TextStream(task.tokenizer) for _ in task.requests]
        self._kept = [""] * len(task.requests)
        self._ended = [False] * len(task.requests)
        self._at = 0
        self._begun = False

    def take(self, index: int, token: int | None) -> None:
        """Takes a token of an answer; None at its end."""
        stream = self._streams[index]
        self._ended[index] = token is None
        self._kept[index] += stream.end() if token is None else stream.add(token)
        while self._at < len(self._kept):
            self._print()
            if not self._ended[self._at]:
                return
            self._say("\n")
            self._at += 1
            self._begun = False

    def _print(self) -> None:
        title = self._task.title(self._at)
        if title and not self._begun:
            self._say(f"{title}\n")
        self._begun = True
        self._say(printable(self._kept[self._at], keep="\n\t"))
        self._kept[self._at] = ""

    def _say(self, text: str) -> None:
        if text and self._output.speaks:
            click.echo(text, nl=False)


def _print(task: _Task, answers: Sequence[Answer]) -> None:
    for index, answer in enumerate(answers):
        title = task.title(index)
        if title:
            click.echo(title)
        click.echo(printable(task.text(answer), keep="\n\t"))


def _document(task: _Task, answers: Sequence[Answer], generation: Generation) -> dict[str, Any]:
    """What ``--json`` prints; see docs/json.md."""
    entries = [
        {
            "prompt": prompt,
            "text": task.text(answer),
            "prompt_tokens": len(request.prompt_ids),
            "new_tokens": len(answer.ids),
            "finish_reason": answer.finish_reason,
        }
        for prompt, request, answer in zip(task.prompts, task.requests, answers, strict=True)
    ]
    seconds = generation.prefill.seconds + generation.decode.seconds
    new = sum(len(answer.ids) for answer in answers)
    return {
        # Fields from before there were several prompts.
        **entries[0],
        "answers": entries,
        "seconds": seconds,
        "tokens_per_s": new / seconds if seconds else None,
        "prefill": _pace(generation.prefill),
        "decode": _pace(generation.decode),
    }


def _speed(pace: Pace) -> str:
    return f"{pace.tokens} tokens in {pace.seconds:.2f} s" + (f", {pace.per_second:.1f} a second" if pace.per_second else "")


def _pace(pace: Pace) -> dict[str, Any]:
    return {"tokens": pace.tokens, "seconds": pace.seconds, "tokens_per_s": pace.per_second}
