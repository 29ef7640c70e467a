"""Chat templates, in a process of their own with limits of time and memory: :func:`main` is that process.

A template is a program out of a checkpoint.  jinja2's sandbox keeps it from files and from Python's insides, but not from work
without end: three nested loops, ``9 ** 9 ** 9``, a text of all the memory there is.  Most of that can be ended only from outside.
The process is one for all prompts, since it takes most of a second to start.
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

#: Seconds of processor time for all prompts together, and for each: a long template with tools takes a millisecond.  Processor time,
#: since a busy machine takes none of it.
_SECONDS, _SECONDS_EACH = 3.0, 0.02
#: Bytes that rendering may take beyond what the process has when it begins.
_MEMORY = 1 << 30
#: Characters of a text beyond twice its prompt: the longest system prompts are a tenth of it, and tokenizing takes time too.
_MORE_CHARACTERS = 1 << 20
#: Seconds on the wall for imports and everything else, for a process that is stopped rather than busy.
_PATIENCE_S = 300.0

#: The process.  It has this one's path and so its packages, whatever put them there; ``-m`` would search the working directory first,
#: which may be the checkpoint.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from rtp_llm.runtime.chat import main; main()"

#: What a template may raise: its own errors, those of the expressions in it, and the limit of memory.
_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def chat_texts(template: str, special_tokens: Mapping[str, Any], prompts: Sequence[str]) -> list[str]:
    """Each prompt as the user's first message in ``template``, which sees ``special_tokens`` by name, up to where the answer begins.

    Raises:
        ConfigError: ``BAD_CHAT_TEMPLATE``, for a template that fails, or that takes more time, memory or text than any should.
    """
    seconds = _SECONDS + _SECONDS_EACH * len(prompts)
    asked = {"template": template, "special_tokens": dict(special_tokens), "prompts": list(prompts), "seconds": seconds}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROGRAM, *sys.path],
            input=json.dumps(asked).encode(),
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
    """From here on this process ends (SIGXCPU) after so much processor time, and gets no more than :data:`_MEMORY`."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)  # one that is ignored stays so in a child
    used = resource.getrusage(resource.RUSAGE_SELF)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = {
        resource.RLIMIT_CPU: math.ceil(used.ru_utime + used.ru_stime + seconds),
        resource.RLIMIT_AS: pages * resource.getpagesize() + _MEMORY,
        resource.RLIMIT_CORE: 0,  # a file of what was in memory helps nobody
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
    """Reads what is asked from stdin, and writes ``{"texts": [...]}`` or ``{"error": "..."}`` to stdout."""
    asked = json.load(sys.stdin.buffer)
    _rendered("", {}, "")  # what is imported and compiled for any template is not its own work
    _limit(asked["seconds"])
    try:
        answer: dict[str, Any] = {"texts": [_rendered(asked["template"], asked["special_tokens"], prompt) for prompt in asked["prompts"]]}
    except _ERRORS as error:
        answer = {"error": brief(error)}
    print(json.dumps(answer))
