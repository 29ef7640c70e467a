"""Renders chat templates in another process, with limits on time and memory; :func:`main` runs in that process.

A template is a program from an untrusted checkpoint.  jinja2's sandbox keeps it from files and from Python's internals, but not
from endless work or memory: nested loops, ``9 ** 9 ** 9``.  Most of that can only be stopped from outside.  One process renders
all prompts, since it takes most of a second to start.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.runtime.faults import RuntimeFault

#: Seconds of processor time for all prompts together, and for each; a long template with tools takes a millisecond.  Processor
#: time does not depend on other load.
_SECONDS, _SECONDS_EACH = 3.0, 0.02
#: Bytes that rendering may take beyond what the process has when it begins.
_MEMORY = 1 << 30
#: Characters allowed beyond twice the prompt: ten times the longest system prompts, and still quick to tokenize.
_MORE_CHARACTERS = 1 << 20
#: Wall-clock seconds for imports and everything else, in case the process hangs without using the processor.
_PATIENCE_S = 300.0

#: The program of the process.  It gets this process's ``sys.path``.  ``-m`` would search the working directory first, which may be
#: the checkpoint.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from rtp_llm.runtime.chat import main; main()"

#: What a template may raise: its own errors, those of its expressions, and out of memory.
_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def chat_texts(template: str, special_tokens: Mapping[str, Any], prompts: Sequence[str]) -> list[str]:
    """Each prompt as the user's first message, rendered by ``template`` with ``special_tokens``, up to where the answer begins.

    Raises:
        ConfigError: ``BAD_CHAT_TEMPLATE``, for a template that fails or exceeds a limit of time, memory or text.
    """
    seconds = _SECONDS + _SECONDS_EACH * len(prompts)
    request = {"template": template, "special_tokens": dict(special_tokens), "prompts": list(prompts), "seconds": seconds}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=_PATIENCE_S + seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _bad(f"no answer within {_PATIENCE_S + seconds:g} s") from error
    if done.returncode == -signal.SIGXCPU:
        raise _bad(f"it runs for more than {seconds:g} s of processor time; its loops may have no end")
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise _bad(f"its process ended with {done.returncode}: {''.join(last)[:300]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise _bad(answer["error"])
    texts: list[str] = answer["texts"]
    return texts


def _bad(actual: str) -> ConfigError:
    return ConfigError(
        Problem(RuntimeFault.BAD_CHAT_TEMPLATE, "the chat template fails", actual=actual, expected="a prompt", fix="use --raw")
    )


def brief(error: BaseException) -> str:
    """An error of somebody else's code, in one line."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"[:300]


def _limit(seconds: float) -> None:
    """Limits this process to ``seconds`` more of processor time (then SIGXCPU) and :data:`_MEMORY` more bytes."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # a child inherits an ignored signal
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: math.ceil(used.ru_utime + used.ru_stime + seconds),
        resource.RLIMIT_AS: pages * resource.getpagesize() + _MEMORY,
        resource.RLIMIT_CORE: 0,  # no core dump
    }
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _rendered(template: str, special_tokens: Mapping[str, Any], prompt: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [[{"role": "user", "content": prompt}]]
    text = render_jinja_template(messages, chat_template=template, add_generation_prompt=True, **special_tokens)[0][0]
    most = 2 * len(prompt) + _MORE_CHARACTERS
    if len(text) > most:
        raise ValueError(f"{len(text)} characters of a prompt that has {len(prompt)}; {most} are allowed")
    return text


def main() -> None:
    """Reads the request from stdin, and writes ``{"texts": [...]}`` or ``{"error": "..."}`` to stdout."""
    request = json.load(sys.stdin.buffer)
    _rendered("", {}, "")  # imports and compiles before the limit starts
    _limit(request["seconds"])
    try:
        answer: dict[str, Any] = {
            "texts": [_rendered(request["template"], request["special_tokens"], prompt) for prompt in request["prompts"]]
        }
    except _ERRORS as error:
        answer = {"error": brief(error)}
    print(json.dumps(answer))
