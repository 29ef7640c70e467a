"""Temperature, top-k and top-p are those of transformers; draws follow the probabilities, the seed, and nothing else."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rtp_llm.errors import ConfigError
from rtp_llm.runtime.sampling import Sampler, Sampling, pick_tokens, remaining

VOCAB = 37


def scores(rows: int, seed: int) -> torch.Tensor:
    """Logits that spread as those of a model do."""
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def by_transformers(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The probabilities that transformers would draw from."""
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    logits = TemperatureLogitsWarper(float(sampling.temperature))(ids, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
    if sampling.top_p < 1:
        logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
    return logits.softmax(-1)


@settings(max_examples=100, deadline=None)
@given(
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, 2**16),
    ties=st.booleans(),
)
@example(temperature=0.5, top_k=0, top_p=1 - 2**-53, seed=0, ties=False)
def test_what_remains_is_what_transformers_leaves(temperature: float, top_k: int, top_p: float, seed: int, ties: bool) -> None:
    """The same tokens with the same probabilities, in float32 to rounding; tokens that score like the last of top-k stay."""
    logits = scores(3, seed)
    if ties:
        logits = logits.round()
    sampling = Sampling(temperature, top_k, top_p)
    ordered, order = remaining(logits, [sampling] * 3)
    got = torch.zeros_like(logits).scatter(1, order, ordered.float())
    wanted = by_transformers(logits, sampling)
    for row in range(3):
        ours, theirs = got[row][got[row] > 0].sort().values, wanted[row][wanted[row] > 0].sort().values
        # Where probabilities come to top_p within rounding one token more or less is right, and of equal ones any.
        assert abs(len(ours) - len(theirs)) <= 1
        if len(ours) == len(theirs):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
            assert ties or torch.equal(got[row] > 0, wanted[row] > 0)


def test_rows_have_their_own_settings() -> None:
    """One batch, four ways to choose: each row is left what it would be left alone."""
    logits = scores(4, 5)
    ways = [Sampling(), Sampling(0.7), Sampling(1.3, top_k=4), Sampling(1.0, top_p=0.6)]
    ordered, order = remaining(logits, ways)
    for row, sampling in enumerate(ways[1:], 1):
        alone, tokens = remaining(logits[row : row + 1], [sampling])
        assert torch.equal(alone[0], ordered[row]) and torch.equal(tokens[0], order[row])
    samplers = [Sampler(way) for way in ways]
    for _ in range(50):
        tokens_drawn = pick_tokens(logits, samplers)
        assert tokens_drawn[0] == logits[0].argmax()
        assert tokens_drawn[2] in logits[2].topk(4).indices


class Held(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the results of torch's operations while they live, and ``peak``, the most at any time.  A view holds its storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._holders: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._hold(storage.data_ptr(), storage.nbytes(), 1)
                weakref.finalize(tensor, self._hold, storage.data_ptr(), storage.nbytes(), -1)
        self.peak = max(self.peak, self.now)
        return out

    def _hold(self, storage: int, nbytes: int, more: int) -> None:
        before = self._holders[storage]
        self._holders[storage] += more
        self.now += nbytes * (bool(self._holders[storage]) - bool(before))


@pytest.mark.parametrize("scores_at_a_time", [4 * 2000 + 1, 3 * 2000, 1])
def test_a_large_batch_is_drawn_in_groups(scores_at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, what choosing takes is bounded, and tokens are those of all rows at once: mixed settings, one
    generator for several rows, a vocabulary above the bound."""
    rows, vocabulary = 50, 2000
    logits = 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2))

    def tokens() -> tuple[list[int], int]:
        shared = Sampler(Sampling(1.2, top_p=0.999, seed=1))
        ways = [Sampler(Sampling()), Sampler(Sampling(0.8, top_k=40, top_p=0.9, seed=5)), shared, shared, Sampler(Sampling(3.0, seed=2))]
        with Held() as held:
            return pick_tokens(logits, ways * (rows // len(ways))), held.peak

    whole, most = tokens()
    monkeypatch.setattr("rtp_llm.runtime.sampling.MOST_SCORES", scores_at_a_time)
    assert most > 40 * rows * vocabulary
    grouped, bounded = tokens()
    assert grouped == whole
    # Beside a group of rows there are the logits, which are sliced, and some numbers for each row.
    assert bounded <= 40 * max(scores_at_a_time, vocabulary) + logits.nbytes + 200 * rows


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws: every frequency within five standard deviations of its probability."""
    logits, sampling, draws = scores(1, 8), Sampling(1.5, top_k=9, top_p=0.95), 20_000
    sampler = Sampler(sampling)
    counts = torch.bincount(torch.tensor(pick_tokens(logits.expand(draws, -1), [sampler] * draws)), minlength=VOCAB)
    for probability, count in zip(by_transformers(logits, sampling)[0].tolist(), counts.tolist(), strict=True):
        assert abs(count - draws * probability) <= 5 * math.sqrt(draws * probability * (1 - probability)) + 1e-9


def test_a_seed_is_an_answer() -> None:
    """The same seed draws the same, whatever stands in the rows beside it; another one draws something else."""

    def drawn(seed: int, beside: int) -> list[int]:
        samplers = [Sampler(Sampling(2.0, seed=s)) for s in (seed, *range(beside))]
        return [
            pick_tokens(scores(len(samplers), 3)[: len(samplers)].index_fill(0, torch.tensor([0]), 0.5), samplers)[0] for _ in range(20)
        ]

    assert drawn(7, 0) == drawn(7, 3)
    assert drawn(7, 0) != drawn(8, 0)


def test_greedy_is_the_best_and_draws_nothing() -> None:
    """Temperature 0 takes the likeliest token, and so does drawing from one."""
    logits = scores(5, 1)
    assert pick_tokens(logits, [Sampler(Sampling())] * 5) == logits.argmax(-1).tolist()
    assert pick_tokens(logits, [Sampler(Sampling(1.0, top_k=1, seed=3))] * 5) == logits.argmax(-1).tolist()
    assert pick_tokens(logits, [Sampler(Sampling(1.0, top_p=1e-6, seed=3))] * 5) == logits.argmax(-1).tolist()
    assert pick_tokens(logits, [Sampler(Sampling(1e-300, seed=3))] * 5) == logits.argmax(-1).tolist()


def test_scores_that_are_no_numbers_give_a_token() -> None:
    """A row of NaN gives some token of the vocabulary, and the row beside it what it gives alone."""
    logits = scores(2, 1)
    logits[0] = math.nan
    first, second = pick_tokens(logits, [Sampler(Sampling(1.0, seed=3)) for _ in range(2)])
    assert 0 <= first < VOCAB and second == pick_tokens(logits[1:], [Sampler(Sampling(1.0, seed=3))])[0]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"temperature": -0.1}, ["temperature"]),
        ({"temperature": math.nan}, ["temperature"]),
        ({"temperature": math.inf, "top_k": -1, "top_p": 0.0, "seed": -1}, ["seed", "temperature", "top_k", "top_p"]),
        ({"temperature": 1.0, "top_p": 1.1}, ["top_p"]),
        ({"top_k": 5, "top_p": 0.9}, ["top_k and top_p"]),
    ],
)
def test_what_makes_no_sense_is_refused(values: dict[str, float], named: list[str]) -> None:
    """Everything at once; and a choice among tokens that greedy answers do not have is not ignored."""
    with pytest.raises(ConfigError) as caught:
        Sampling(**values)  # type: ignore[arg-type]
    assert sorted(problem.what.partition(" is ")[0].partition(" without ")[0] for problem in caught.value.problems) == named
