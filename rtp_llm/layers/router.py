"""Which experts a token goes to, and with what weight.

- *greedy*: the best of all (Shazeer et al., 2017, arXiv:1701.06538), as Mixtral and Qwen do it.  The softmax of the chosen logits
  alone (gpt-oss) is the same as that of all, renormalised.
- *group-limited* (DeepSeek-V2, arXiv:2405.04434): the best of those groups of experts whose best expert is best.
- *noaux_tc* (DeepSeek-V3, arXiv:2412.19437): sigmoid scores; a learnt bias is added for the choice alone; a group counts
  as much as its best two.

Scores are float32.  Among equal scores the lower expert number wins on every device, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.layers.base import Planned
from rtp_llm.plan.pieces import Fill, Piece

#: DeepSeek-V3's reference adds it to the sum of weights, so that zero scores give no NaN.
RENORMALISE_EPSILON = 1e-20


@dataclass(frozen=True, slots=True)
class Routing:
    """A way of choosing ``top_k`` of ``experts``.

    scoring: of the logits; ``softmax`` over all experts, or ``sigmoid`` of each.
    groups, top_groups: experts are ``groups`` runs of equal length, and only the best ``top_groups`` of them are eligible.
    best_two: a group counts as the sum of its two best scores, not as its best one.
    corrected: a float32 bias for each expert is added to the scores for the choice, not for the weights.
    renormalise: the chosen weights are divided by their sum (plus ``epsilon``); then ``scale`` multiplies them.
    wide: logits are computed, and the router's weight is kept, in float32; else in the model's dtype.
    biased: the logits themselves have a bias, of the weight's dtype; not together with ``corrected``.
    """

    experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    corrected: bool = False
    renormalise: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    wide: bool = False
    biased: bool = False

    def __post_init__(self) -> None:
        assert not (self.biased and self.corrected), "one slot, and two meanings"
        problems = list(unroutable(self.experts, self.top_k, self.groups, self.top_groups, self.best_two))
        assert not problems, problems


def unroutable(experts: int, top_k: int, groups: int, top_groups: int, best_two: bool) -> Iterator[tuple[str, str, int]]:
    """Why a routing is impossible: for each reason the argument, the expected value, and the actual one."""
    if groups > experts or experts % groups:
        yield "groups", f"a divisor of the number of experts ({experts})", groups
        return
    each = experts // groups
    if top_groups > groups:
        yield "top_groups", f"at most the number of groups ({groups})", top_groups
        return
    if best_two and top_groups < groups and each < 2:
        yield "groups", f"at most half the number of experts ({experts}), as a group counts by its best two", groups
    if top_k > top_groups * each:
        eligible = f"the {experts} experts" if top_groups == groups else f"the {top_groups * each} experts of {top_groups} group(s)"
        yield "top_k", f"at most {eligible}", top_k


def route(logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``logits [tokens, experts]`` to weights (float32, or float64 for such logits) and experts (int64), both ``[tokens, top_k]``.

    ``bias [experts]``: given if the routing is ``corrected``.
    """
    assert (bias is not None) == routing.corrected
    logits = logits if logits.dtype == torch.float64 else logits.float()
    scores = logits.sigmoid() if routing.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if routing.top_groups < routing.groups:
        choice = choice.masked_fill(~_eligible(choice, routing), float("-inf"))
    chosen = _best(choice, routing.top_k)
    weights = scores.gather(-1, chosen)
    if routing.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.epsilon)
    return weights * routing.scale, chosen


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the ``count`` best along the last dimension, best first.  ``topk`` does not define the order of equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _eligible(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Which experts are in one of the best groups."""
    grouped = choice.unflatten(-1, (routing.groups, -1))
    worth = grouped.topk(2, dim=-1).values.sum(dim=-1) if routing.best_two else grouped.amax(dim=-1)
    best = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, _best(worth, routing.top_groups), True)
    return best.unsqueeze(-1).expand_as(grouped).flatten(-2)


class Router(Planned):
    """``x [tokens, hidden]`` to weights and experts, ``[tokens, top_k]``; whole on every rank.

    Parameters: ``weight [experts, hidden]`` and, where the routing is biased or corrected, ``bias [experts]``.  A correction is
    float32 whatever the model's dtype: in bfloat16 its steps are as large as the differences between experts.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, slot: str, hidden_size: int, routing: Routing, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.slot = slot
        self.routing = routing
        own = torch.float32 if routing.wide else dtype
        self.declare("weight", (routing.experts, hidden_size), own)
        if routing.corrected or routing.biased:
            self.declare("bias", (routing.experts,), torch.float32 if routing.corrected else own)
        else:
            self.bias = None

    def tiles(self) -> dict[str, tuple[Piece | Fill, ...]]:
        return {
            "weight": (Piece.full(f"{self.slot}.weight", tuple(self.weight.shape)),),
            "bias": (Piece.full(f"{self.slot}.bias", (self.routing.experts,)),),
        }

    def exact(self) -> frozenset[str]:
        return frozenset({"bias"}) if self.routing.corrected else frozenset()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        added, correction = (self.bias, None) if self.routing.biased else (None, self.bias)
        return route(F.linear(x.float() if self.routing.wide else x, self.weight, added), self.routing, correction)
