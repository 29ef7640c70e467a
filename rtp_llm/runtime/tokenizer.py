"""Tokenizer and chat template, through transformers, from the checkpoint's own files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.runtime.chat import brief, chat_texts
from rtp_llm.runtime.faults import RuntimeFault

#: What transformers raises for absent or invalid tokenizer files.
_TOKENIZER_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, IndexError, RecursionError)

#: The replacement for bytes of an incomplete character.
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
            actual=brief(error),
            fix="copy tokenizer.json and tokenizer_config.json from where the model was published",
        )
        raise ConfigError(problem) from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str, *, raw: bool) -> list[int]:
    """Token ids of a prompt: as the user's first message in the chat template, or as it is if ``raw``.

    Raises:
        ConfigError: no chat template, a broken one, or a prompt without a single token.
    """
    return encode_text(tokenizer, prompt_texts(tokenizer, [prompt], raw=raw)[0], raw=raw)


def prompt_texts(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], *, raw: bool) -> list[str]:
    """The text of each prompt for :func:`encode_text`.

    Raises:
        ConfigError: no chat template, a broken one, or one that does not end.
    """
    if raw:
        return list(prompts)
    if not tokenizer.chat_template:
        fix = "use --raw, or a checkpoint that was trained to chat"
        where = "tokenizer_config.json or chat_template.jinja"
        raise ConfigError(
            Problem(RuntimeFault.NO_CHAT_TEMPLATE, "the checkpoint has no chat template", expected=where, actual="none", fix=fix)
        )
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several, and none of them the default
        problem = Problem(
            RuntimeFault.NO_CHAT_TEMPLATE,
            "no chat template is its default",
            expected="one of that name",
            actual=brief(error),
            fix="use --raw",
        )
        raise ConfigError(problem) from error
    return chat_texts(template, tokenizer.special_tokens_map, prompts)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, raw: bool) -> list[int]:
    """Token ids of a text of :func:`prompt_texts`.  A chat template has added special tokens; for raw text the tokenizer adds its own.

    Raises:
        ConfigError: a text without a single token.
    """
    ids = [int(i) for i in tokenizer(text, add_special_tokens=raw)["input_ids"]]
    if not ids:
        problem = Problem(RuntimeFault.BAD_PROMPT, "the prompt has no tokens", expected="at least one token", actual=repr(text))
        raise ConfigError(problem)
    return ids


class TextStream:
    """Text of a growing list of tokens, as soon as it is certain.

    A character may be split over tokens, and the text of a token may depend on the one before (a leading space).  So each piece
    is decoded together with the one before.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._decoded_to = 0

    def add(self, token: int) -> str:
        """The text that is certain since the last call; empty while a character is incomplete."""
        self._ids.append(token)
        return self._since(_INCOMPLETE)

    def end(self) -> str:
        """What is left when no more tokens come."""
        return self._since(None)

    def _since(self, hold: str | None) -> str:
        before, now = self._decoded(self._ids[self._start : self._decoded_to]), self._decoded(self._ids[self._start :])
        if len(now) <= len(before) or (hold is not None and now.endswith(hold)):
            return ""
        self._start, self._decoded_to = self._decoded_to, len(self._ids)
        return now[len(before) :]

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
