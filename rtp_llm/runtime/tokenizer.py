"""Tokenizer and chat template, through transformers, from the checkpoint's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.runtime.faults import RuntimeFault

#: What transformers raises for tokenizer files that are absent or make no sense.
_TOKENIZER_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, IndexError, RecursionError)

#: What a template may raise: its own errors, and those of the expressions in it.
_TEMPLATE_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


#: What decoders put in the place of bytes that are no character yet.
_INCOMPLETE = "\ufffd"


def load_tokenizer(directory: str | Path) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer.  Local files only, and code from the checkpoint is never run.

    Raises:
        ConfigError: ``BAD_TOKENIZER`` where the files are absent, broken, or need code from the checkpoint.
    """
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # The Rust half of tokenizers raises plain Exception for a broken tokenizer.json.
        if type(error) is not Exception and not isinstance(error, _TOKENIZER_ERRORS):
            raise
        problem = Problem(
            RuntimeFault.BAD_TOKENIZER,
            "the tokenizer cannot be loaded",
            file="tokenizer.json",
            expected="tokenizer files that transformers can read without the checkpoint's own code",
            actual=_brief(error),
            fix="copy tokenizer.json and tokenizer_config.json from where the model was published",
        )
        raise ConfigError(problem) from error


def _brief(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"[:300]


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: as the user's first message in the chat template or, where ``raw``, as it is.

    Raises:
        ConfigError: no chat template, a broken one, or a prompt without a single token.
    """
    ids = _plain(tokenizer(prompt)["input_ids"]) if raw else _chat(tokenizer, prompt)
    if not ids:
        problem = Problem(RuntimeFault.BAD_PROMPT, "the prompt has no tokens", expected="at least one token", actual=repr(prompt))
        raise ConfigError(problem)
    return ids


def _chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if not tokenizer.chat_template:
        fix = "use --raw, or a checkpoint that was trained to chat"
        where = "tokenizer_config.json or chat_template.jinja"
        raise ConfigError(
            Problem(RuntimeFault.NO_CHAT_TEMPLATE, "the checkpoint has no chat template", expected=where, actual="none", fix=fix)
        )
    encoded: Any
    messages = [{"role": "user", "content": prompt}]
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except _TEMPLATE_ERRORS as error:
        problem = Problem(
            RuntimeFault.BAD_CHAT_TEMPLATE, "the chat template fails", actual=_brief(error), expected="a prompt", fix="use --raw"
        )
        raise ConfigError(problem) from error
    return _plain(encoded["input_ids"])


def _plain(ids: Sequence[Any]) -> list[int]:
    return [int(i) for i in ids]


class TextStream:
    """Text of a growing list of tokens, as soon as it is certain.

    A character may be split over tokens, and what a token says may depend on the one before it (a leading space): so each piece
    of text is decoded together with the piece before it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._told = 0

    def add(self, token: int) -> str:
        """The text that is certain since the last call; empty while a character is incomplete."""
        self._ids.append(token)
        return self._since(_INCOMPLETE)

    def end(self) -> str:
        """What is left when no more tokens come."""
        return self._since(None)

    def _since(self, hold: str | None) -> str:
        before, now = self._decoded(self._ids[self._start : self._told]), self._decoded(self._ids[self._start :])
        if len(now) <= len(before) or (hold is not None and now.endswith(hold)):
            return ""
        self._start, self._told = self._told, len(self._ids)
        return now[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
