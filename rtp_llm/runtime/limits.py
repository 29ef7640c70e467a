"""Limits of a model from its configuration files, known before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import read_config, read_json_file
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.models.registry import find_family
from rtp_llm.runtime.faults import RuntimeFault

#: What to use for a model of the other kind.
_OTHER = {"causal": "rtp-llm embed", "encoder": "rtp-llm generate"}


def require_kind(directory: str | Path, kind: str) -> None:
    """Refuses a checkpoint whose family is not of ``kind`` (``causal`` | ``encoder``).

    Raises:
        ConfigError: ``WRONG_KIND``, or an architecture that no family knows.
    """
    architectures = read_config(directory)["architectures"]
    family = find_family(architectures)
    if family.kind != kind:
        problem = Problem(
            RuntimeFault.WRONG_KIND,
            f"{architectures[0]} is not that kind of model",
            file="config.json",
            expected=f"a model of kind {kind}",
            actual=family.kind,
            fix=f"use {_OTHER[kind]}",
        )
        raise ConfigError(problem)


@dataclass(frozen=True, slots=True)
class Limits:
    """``context``: the most tokens of a sequence, prompt and answer together.  ``vocabulary``: ids are smaller.  None: unknown."""

    context: int | None
    vocabulary: int | None

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Refuses a prompt that leaves no room for an answer, or has ids without an embedding.

        Raises:
            ConfigError: with everything that is wrong.
        """
        problems = []
        if self.context is not None and len(prompt_ids) >= self.context:
            expected = f"fewer than {self.context} tokens (max_position_embeddings)"
            problems.append(
                Problem(RuntimeFault.BAD_PROMPT, "the prompt is too long", expected=expected, actual=f"{len(prompt_ids)} tokens")
            )
        highest = max(prompt_ids)
        if self.vocabulary is not None and highest >= self.vocabulary:
            what = "the tokenizer made a token id that the model does not have; they do not belong together"
            expected = f"ids below {self.vocabulary} (vocab_size)"
            problems.append(Problem(RuntimeFault.BAD_PROMPT, what, file="config.json", expected=expected, actual=str(highest)))
        if problems:
            raise ConfigError(problems)

    def room(self, prompt_length: int, wanted: int) -> int:
        """How many of ``wanted`` new tokens fit behind a prompt of ``prompt_length`` tokens."""
        return wanted if self.context is None else min(wanted, self.context - prompt_length)


def generation_limits(directory: str | Path) -> Limits:
    """The limits of a causal language model.  Raises ``CheckpointError`` where ``config.json`` cannot be read."""
    config = read_config(directory)
    return Limits(_positive(config, "max_position_embeddings"), _positive(config, "vocab_size"))


def _positive(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def stop_tokens(directory: str | Path, tokenizer_eos: int | None) -> frozenset[int]:
    """Every token that ends an answer: from ``generation_config.json``, ``config.json`` and the tokenizer.

    Chat models end a turn and a text with different tokens, and the three files often name one each.

    Raises:
        ConfigError: where ``eos_token_id`` is neither a token id nor a list of them.
    """
    found = set() if tokenizer_eos is None else {tokenizer_eos}
    problems = []
    for name, content in (
        ("generation_config.json", read_json_file(directory, "generation_config.json")),
        ("config.json", read_config(directory)),
    ):
        value = (content or {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            found.update(ids)
        else:
            what = "eos_token_id is no token id"
            problems.append(
                Problem(
                    RuntimeFault.BAD_GENERATION_CONFIG, what, file=name, expected="a number or a list of numbers", actual=repr(value)[:100]
                )
            )
    if problems:
        raise ConfigError(problems)
    return frozenset(found)
