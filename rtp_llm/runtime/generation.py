"""Continuous batching: when a sequence ends, the next prompt takes its cache row.

A prompt is prefilled alone, or with others of equal length.  All running sequences then decode together, one token a pass.
Answers do not depend on the other sequences, except for the last bits of the arithmetic.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch

from rtp_llm.kernels.paging import pages_for
from rtp_llm.layers.cache import CacheSize, PagedCache
from rtp_llm.runtime.sampling import Sampler, Sampling, pick_tokens

#: Prompt tokens of one pass, unless one prompt has more: enough to fill a GPU, and a bound on the memory of activations.
PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt of at least one token, the most tokens to add (at least 1), and how to sample them."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = Sampling()

    @property
    def length(self) -> int:
        """Tokens that the cache must hold; the last new one is not an input."""
        return len(self.prompt_ids) + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class Answer:
    """New token ids, without the token that ended them; ``finish_reason`` is ``stop`` (an end token) or ``length``."""

    ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Event:
    """A new ``token`` of request number ``index``, or its whole ``answer`` at the end."""

    index: int
    token: int | None = None
    answer: Answer | None = None


@dataclass(slots=True)
class Pace:
    """Tokens and seconds, of prefill or of decode."""

    tokens: int = 0
    seconds: float = 0.0

    @property
    def per_second(self) -> float | None:
        """Tokens a second; None where nothing was measured."""
        return self.tokens / self.seconds if self.seconds else None


class Decoder(Protocol):
    """A decode step; :mod:`rtp_llm.runtime.graphs` has another implementation."""

    def __call__(self, tokens: Sequence[int], cache_rows: Sequence[int]) -> torch.Tensor:
        """Logits ``[sequences, vocab]`` after one more token for each cache row."""


class EagerDecoder:
    """The model's own forward pass."""

    def __init__(self, model: Any, cache: PagedCache) -> None:
        self._model, self._cache = model, cache

    def __call__(self, tokens: Sequence[int], cache_rows: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor(tokens, dtype=torch.long)[:, None].to(self._cache.device)
        logits: torch.Tensor = self._model(ids, self._cache, cache_rows)[:, -1]
        return logits


@dataclass(slots=True)
class _Sequence:
    index: int
    request: GenerationRequest
    cache_row: int
    sampler: Sampler
    ids: list[int] = field(default_factory=list)


def cache_size(requests: Sequence[GenerationRequest], batch_size: int) -> CacheSize:
    """A cache large enough for any ``batch_size`` of these requests at once."""
    rows = min(batch_size, len(requests))
    lengths = sorted((request.length for request in requests), reverse=True)
    return CacheSize(rows, sum(map(pages_for, lengths[:rows])), lengths[0])


class Generation:
    """Answers ``requests`` with a causal ``model`` and an empty ``cache``.

    Under tensor parallelism every rank does the same and gets the same answers.  ``stop_ids`` are tokens that end an answer.
    ``prefill`` and ``decode`` measure the speed.
    """

    def __init__(
        self,
        model: Any,
        requests: Sequence[GenerationRequest],
        cache: PagedCache,
        *,
        stop_ids: Collection[int] = (),
        decoder: Decoder | None = None,
    ) -> None:
        self._model, self._cache, self._stop_ids = model, cache, frozenset(stop_ids)
        self._decoder = decoder or EagerDecoder(model, cache)
        self._waiting = deque(enumerate(requests))
        self._running: list[_Sequence] = []
        self.prefill, self.decode = Pace(), Pace()

    def events(self) -> Iterator[Event]:
        """All events, in order; may be iterated once.  Stopping early releases the cache rows.

        Raises:
            ForwardError: a request that is too large for the empty cache.
        """
        try:
            while self._waiting or self._running:
                for together in _alike(self._admitted()):
                    yield from self._advanced(together, self._first(together))
                if self._running:
                    yield from self._advanced(list(self._running), self._next(self._running))
        finally:
            for sequence in self._running:
                self._cache.release(sequence.cache_row)
            self._running.clear()

    def _admitted(self) -> list[_Sequence]:
        """Starts waiting requests, in order, while the cache has pages for their whole answers."""
        started: list[_Sequence] = []
        while self._waiting and self._cache.free_rows:
            index, request = self._waiting[0]
            if pages_for(request.length) > self._cache.free_pages and self._running:
                break
            cache_row = self._cache.take(request.length)
            self._waiting.popleft()
            started.append(_Sequence(index, request, cache_row, Sampler(request.sampling)))
            self._running.append(started[-1])
        return started

    @torch.inference_mode()
    def _first(self, started: Sequence[_Sequence]) -> list[int]:
        began = time.perf_counter()
        ids = torch.tensor([s.request.prompt_ids for s in started], dtype=torch.long).to(self._cache.device)
        logits = self._model(ids, self._cache, [s.cache_row for s in started], last=True)[:, -1]
        tokens = pick_tokens(logits, [s.sampler for s in started])
        self.prefill.tokens += ids.numel()
        self.prefill.seconds += time.perf_counter() - began
        return tokens

    @torch.inference_mode()
    def _next(self, running: Sequence[_Sequence]) -> list[int]:
        began = time.perf_counter()
        logits = self._decoder([s.ids[-1] for s in running], [s.cache_row for s in running])
        tokens = pick_tokens(logits, [s.sampler for s in running])
        self.decode.tokens += len(tokens)
        self.decode.seconds += time.perf_counter() - began
        return tokens

    def _advanced(self, sequences: Sequence[_Sequence], tokens: Sequence[int]) -> Iterator[Event]:
        for sequence, token in zip(sequences, tokens, strict=True):
            ended = token in self._stop_ids
            if not ended:
                sequence.ids.append(token)
                yield Event(sequence.index, token=token)
            if ended or len(sequence.ids) == sequence.request.max_new_tokens:
                self._running.remove(sequence)
                self._cache.release(sequence.cache_row)
                yield Event(sequence.index, answer=Answer(tuple(sequence.ids), "stop" if ended else "length"))


def _alike(started: Sequence[_Sequence]) -> Iterator[list[_Sequence]]:
    """Groups of sequences with prompts of equal length, each small enough for one pass."""
    by_length = sorted(started, key=lambda s: len(s.request.prompt_ids))
    for length, same in groupby(by_length, key=lambda s: len(s.request.prompt_ids)):
        group, most = list(same), max(1, PREFILL_TOKENS // length)
        yield from (group[i : i + most] for i in range(0, len(group), most))


def generate_all(model: Any, requests: Sequence[GenerationRequest], *, stop_ids: Collection[int] = (), batch_size: int = 8) -> list[Answer]:
    """The answers to all requests, in their order, ``batch_size`` sequences at a time."""
    if not requests:
        return []
    cache = model.cache_of(cache_size(requests, batch_size))
    answers: dict[int, Answer] = {}
    for event in Generation(model, requests, cache, stop_ids=stop_ids).events():
        if event.answer is not None:
            answers[event.index] = event.answer
    return [answers[index] for index in range(len(requests))]


def generate(model: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int] = ()) -> Answer:
    """The most likely continuation of one prompt.

    Args:
        model: a causal model.  Under tensor parallelism every rank calls this alike, and gets the same answer.
        prompt_ids: token ids, at least one.
        max_new_tokens: the most tokens to add, at least 1.
        stop_ids: tokens that end the answer.
    """
    return generate_all(model, [GenerationRequest(tuple(prompt_ids), max_new_tokens)], stop_ids=stop_ids)[0]
