"""``rtp-llm generate``: load a causal language model and let it answer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from rtp_llm.cli.options import LOADING, checkpoint_argument, common, output_of, setting_options
from rtp_llm.cli.output import printable
from rtp_llm.cli.session import load_for

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rtp_llm.runtime.limits import Limits

_EXAMPLES = """\b
Examples:
  rtp-llm generate ./SmolLM2-135M-Instruct --prompt "What is the capital of France?"
  rtp-llm generate ./SmolLM2-135M --raw --prompt "Once upon a time" --max_new_tokens 50
  torchrun --nproc-per-node 3 -m rtp_llm.cli generate ./SmolLM2-135M-Instruct --prompt "Hello"
"""


@click.command(short_help="Generate text with a causal language model.", epilog=_EXAMPLES)
@checkpoint_argument
@click.option("--prompt", required=True, help="What to say to the model.")
@click.option("--max_new_tokens", type=click.IntRange(1, 1_000_000), default=128, show_default=True, help="Stop after this many tokens.")
@click.option("--raw", is_flag=True, help="Give the prompt as it is, without the chat template.")
@setting_options(*LOADING)
@common
@click.pass_context
def generate(context: click.Context, /, checkpoint: str, prompt: str, max_new_tokens: int, raw: bool, **flags: Any) -> int:
    """Generate text with the checkpoint directory CKPT, greedily: the most likely token each time.

    The prompt goes through the checkpoint's chat template; a checkpoint without one needs --raw.
    """
    loaded, task = load_for(context, checkpoint, flags, lambda: _prepare(checkpoint, prompt, raw))

    from rtp_llm.runtime.generation import generate as complete

    room = task.limits.room(len(task.prompt_ids), max_new_tokens)
    began = time.monotonic()
    answer = complete(loaded.model, task.prompt_ids, room, task.stop_ids)
    seconds = time.monotonic() - began
    text = task.tokenizer.decode(list(answer.ids), skip_special_tokens=True)
    document = {
        "prompt": prompt,
        "text": text,
        "prompt_tokens": len(task.prompt_ids),
        "new_tokens": len(answer.ids),
        "finish_reason": answer.finish_reason,
        "seconds": seconds,
        "tokens_per_s": len(answer.ids) / seconds if seconds else None,
        "load": loaded.report.to_json(),
    }
    output_of(context).emit(document, lambda: click.echo(printable(text, keep="\n\t")))
    return 0


@dataclass(frozen=True, slots=True)
class _Task:
    """What to say to the model, and when it has answered."""

    tokenizer: PreTrainedTokenizerBase
    prompt_ids: list[int]
    stop_ids: frozenset[int]
    limits: Limits


def _prepare(checkpoint: str, prompt: str, raw: bool) -> _Task:
    from rtp_llm.runtime.limits import generation_limits, require_kind, stop_tokens
    from rtp_llm.runtime.tokenizer import encode_prompt, load_tokenizer

    require_kind(checkpoint, "causal")
    tokenizer = load_tokenizer(checkpoint)
    prompt_ids = encode_prompt(tokenizer, prompt, raw=raw)
    limits = generation_limits(checkpoint)
    limits.check(prompt_ids)
    return _Task(tokenizer, prompt_ids, stop_tokens(checkpoint, tokenizer.eos_token_id), limits)
