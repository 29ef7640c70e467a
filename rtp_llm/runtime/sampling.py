"""How the next token is chosen: the most likely one, or one drawn from what temperature, top-k and top-p leave."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.errors import ConfigError, Problem
from rtp_llm.runtime.faults import RuntimeFault

#: The largest seed that torch's generators take.
MOST_SEED = 2**63 - 1

#: Below this all temperatures are the same: the next best token has no probability left, unless its score is the very same.
_LEAST_TEMPERATURE = 1e-6


#: Scores from which tokens are drawn at a time.  For each of them 40 bytes are held at the peak: float32 scores and sorted scores, the
#: order (int64), and in float64 the probabilities and two of their sums.  So 168 MB, for 27 rows of a vocabulary of 152,000, which
#: is work enough for a GPU.  A batch of hundreds of rows at once would take gigabytes that no check of memory has counted.
MOST_SCORES = 1 << 22


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy; else scores are divided by it, the ``top_k`` best are kept (0: all), and of these as few as
    together have ``top_p`` of the probability (Holtzman et al., 2019, arXiv:1904.09751), in this order, as in transformers.

    ``seed``: of this sequence's own generator, so that its answer depends on no other sequence.  Raises ``ConfigError``.
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
    """One sequence's way to choose, and its random numbers.  They are drawn on the CPU, so that all ranks draw the same."""

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
    # Of all rows before the first group, so that the order of a generator's numbers is that of rows.
    drawn = torch.tensor([[sampler.draw()] for sampler in samplers], dtype=torch.float64).to(logits.device)
    samplings = [sampler.sampling for sampler in samplers]
    rows = max(1, MOST_SCORES // logits.shape[-1])
    groups = [slice(first, first + rows) for first in range(0, len(samplings), rows)]
    tokens = torch.cat([_drawn(logits[group], samplings[group], drawn[group]) for group in groups])
    greedy = torch.tensor([sampling.greedy for sampling in samplings]).to(logits.device)
    return [int(i) for i in torch.where(greedy, best, tokens).tolist()]


def _drawn(logits: torch.Tensor, samplings: Sequence[Sampling], drawn: torch.Tensor) -> torch.Tensor:
    """Tokens ``[rows]``: those at which the random numbers ``drawn [rows, 1]``, in [0, 1), stand among the probabilities."""
    ordered, order = remaining(logits, samplings)
    reached = ordered.cumsum(dim=-1)
    place = torch.searchsorted(reached, drawn * reached[:, -1:], right=True)
    # A product that is rounded up to the whole sum would fall behind the last token that is left.
    # Of scores that are no numbers none is left, and a place before the first token would stop a GPU for good.
    place = torch.minimum(place, (ordered > 0).sum(dim=-1, keepdim=True) - 1).clamp_(min=0)
    return order.gather(1, place)[:, 0]


def remaining(logits: torch.Tensor, samplings: Sequence[Sampling]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the tokens that are left, float64 ``[rows, vocab]`` from the likeliest on, and which tokens they are.

    A greedy row is treated as one of temperature 1.  Sums over the vocabulary are float64: float32 has too few digits for its
    smallest members, and a GPU may add in another order the next time, or on another rank, where all ranks have to draw alike.
    """

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)[:, None].to(logits.device)

    vocabulary = logits.shape[-1]
    temperature = column([max(s.temperature or 1.0, _LEAST_TEMPERATURE) for s in samplings], torch.float32)
    last = column([min(s.top_k or vocabulary, vocabulary) - 1 for s in samplings], torch.int64)
    # The best score is zero then, and divided by however little it stays a number.
    scores = (logits.float() - logits.amax(dim=-1, keepdim=True).float()) / temperature
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    # Those that score like the last one of top-k stay too, as in transformers.
    ordered = ordered.masked_fill(ordered < ordered.gather(1, last), float("-inf"))
    probabilities = ordered.double().softmax(dim=-1)
    # From the least likely on, as in transformers: what is left of a sum that begins at the likeliest has no digits near 1.
    behind = probabilities.flip(-1).cumsum(dim=-1).flip(-1)
    dropped = behind <= 1 - column([s.top_p for s in samplings], torch.float64)
    # The likeliest stays, whatever rounding makes of the sum before it.
    dropped[:, 0] = False
    probabilities.masked_fill_(dropped, 0)
    return probabilities.div_(probabilities.sum(dim=-1, keepdim=True)), order
