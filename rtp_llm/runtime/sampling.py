"""Sampling: the most likely token, or one drawn from those that temperature, top-k and top-p leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.runtime.faults import RuntimeFault

#: The largest seed that torch's generators take.
MOST_SEED = 2**63 - 1

#: Lower temperatures make no difference: only tokens with the best score keep any probability.
_LEAST_TEMPERATURE = 1e-6


#: Scores that are sampled at once.  Each takes 40 bytes at the peak: float32 scores and sorted scores, int64 order, and in float64
#: the probabilities and two sums.  So 168 MB, for 27 rows of a vocabulary of 152,000, which is enough work for a GPU.  Hundreds of
#: rows at once would take gigabytes that no memory check has counted.
MOST_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample.  ``temperature`` 0 is greedy; else, in this order, as in transformers: scores are divided by ``temperature``,
    the ``top_k`` best are kept (0: all), and of these the fewest that together have probability ``top_p`` (Holtzman et al.,
    2019, arXiv:1904.09751).

    ``seed``: of this sequence's own generator, so its answer depends on no other sequence.  Raises ``ConfigError``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    def _problems(self) -> Iterator[Problem]:
        allowed = (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a number from 0 on"),
            ("top_k", self.top_k >= 0, "a whole number from 0 on; 0 keeps all tokens"),
            ("top_p", 0 < self.top_p <= 1, "a number above 0, up to 1"),
            ("seed", 0 <= self.seed <= MOST_SEED, f"a whole number from 0 to {MOST_SEED}"),
        )
        for name, good, expected in allowed:
            if not good:
                yield Problem(RuntimeFault.BAD_SAMPLING, f"{name} is not allowed", expected=expected, actual=str(getattr(self, name)))
        changed = [name for name, value in (("top_k", self.top_k != 0), ("top_p", self.top_p != 1)) if value]
        if self.greedy and changed:
            yield Problem(
                RuntimeFault.BAD_SAMPLING,
                f"{' and '.join(changed)} without a temperature",
                expected="a temperature above 0, since greedy answers have no choice",
                actual="temperature 0",
                fix="set temperature, 1.0 for the model's own probabilities",
            )


class Sampler:
    """One sequence's sampling and random numbers, which are drawn on the CPU so that all ranks draw the same."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator().manual_seed(sampling.seed)

    def draw(self) -> float:
        """The next random number in [0, 1); a greedy sequence needs none."""
        return 0.0 if self.sampling.greedy else float(torch.rand((), generator=self._generator, dtype=torch.float64))


def pick_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each row of ``logits [rows, vocab]``."""
    best = logits.argmax(dim=-1)
    if all(sampler.sampling.greedy for sampler in samplers):
        return [int(i) for i in best.tolist()]
    # Drawn for all rows first, so the order of random numbers does not depend on groups.
    drawn = torch.tensor([[sampler.draw()] for sampler in samplers], dtype=torch.float64).to(logits.device)
    samplings = [sampler.sampling for sampler in samplers]
    rows = max(1, MOST_SCORES // logits.shape[-1])
    groups = [slice(first, first + rows) for first in range(0, len(samplings), rows)]
    tokens = torch.cat([_drawn(logits[group], samplings[group], drawn[group]) for group in groups])
    greedy = torch.tensor([sampling.greedy for sampling in samplings]).to(logits.device)
    return [int(i) for i in torch.where(greedy, best, tokens).tolist()]


def _drawn(logits: torch.Tensor, samplings: Sequence[Sampling], drawn: torch.Tensor) -> torch.Tensor:
    """Tokens ``[rows]``, by inverse transform of the random numbers ``drawn [rows, 1]`` in [0, 1)."""
    ordered, order = remaining(logits, samplings)
    reached = ordered.cumsum(dim=-1)
    place = torch.searchsorted(reached, drawn * reached[:, -1:], right=True)
    # A product rounded up to the whole sum would be after the last token that is kept.
    # NaN scores keep no token, and a negative index would crash the CUDA context.
    place = torch.minimum(place, (ordered > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return order.gather(1, place)[:, 0]


def remaining(logits: torch.Tensor, samplings: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the tokens that are kept, float64 ``[rows, vocab]``, the most likely first, and the tokens' ids.

    A greedy row is treated as temperature 1.  Sums over the vocabulary are float64: float32 has too few digits for small
    probabilities.  A GPU may also add in another order on another rank, and all ranks have to draw the same.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].to(logits.device)

    vocabulary = logits.shape[-1]
    temperature = column([max(s.temperature or 1.0, _LEAST_TEMPERATURE) for s in samplings], torch.float32)
    last = column([min(s.top_k or vocabulary, vocabulary) - 1 for s in samplings], torch.int64)
    # The best score becomes zero, which no small temperature can overflow.
    scores = (logits.float() - logits.amax(dim=-1, keepdim=True).float()) / temperature
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    # Ties with the last of top-k are kept, as in transformers.
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last), float("-inf"))
    probabilities = ordered.double().softmax(dim=-1)
    # Summed from the least likely, as in transformers: a sum from the most likely has no digits left near 1.
    behind = probabilities.flip(-1).cumsum(dim=-1).flip(-1)
    dropped = behind <= 1 - column([s.top_p for s in samplings], torch.float64)
    # The most likely token is always kept, whatever the rounding.
    dropped[:, 0] = False
    probabilities.masked_fill_(dropped, 0)
    return probabilities.div_(probabilities.sum(dim=-1, keepdim=True)), order
