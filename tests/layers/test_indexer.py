"""The indexer of sparse attention against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from rtp_llm.layers.indexer import QUERY_BLOCK, Indexer, IndexerShape


def indexer(heads: int, dim: int, top_k: int, hidden: int, latent: int) -> Indexer:
    """With random weights of float32."""
    made = Indexer("i", IndexerShape(heads, dim, top_k), hidden, latent, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for module in made.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.randn(parameter.shape, generator=generator), requires_grad=False))
    return made


def normal(*shape: int) -> torch.Tensor:
    """Random numbers, the same in every run: no two scores so close that float32 and float64 could disagree."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def defined(made: Indexer, x: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """For each query the set of ``top_k`` earlier tokens with the highest ``sum_h w_h relu(q_h k)``, one query at a time."""
    heads, dim = made.shape.heads, made.shape.head_dim
    x, latent = x.double(), latent.double()
    q = (latent @ made.q.weight.double().T).view(*latent.shape[:2], heads, dim)
    k = torch.nn.functional.layer_norm(x @ made.k.weight.double().T, (dim,), made.k_norm.weight.double(), made.k_norm.bias.double(), 1e-6)
    weights = x @ made.weights.weight.double().T
    chosen = torch.zeros(*x.shape[:2], x.shape[1], dtype=torch.bool)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            scores = [(weights[b, t] * (q[b, t] @ k[b, s]).relu()).sum().item() for s in range(t + 1)]
            best = sorted(range(t + 1), key=lambda s: -scores[s])[: made.top_k]
            chosen[b, t, best] = True
    return chosen


@pytest.mark.parametrize("tokens", [9, QUERY_BLOCK + 5])
def test_the_best_tokens_are_chosen(tokens: int) -> None:
    """Every query sees its ``top_k`` best, or all of those before it where there are fewer, and never one behind it; in blocks
    of queries as in one."""
    made = indexer(16, 10, 6, 24, 12)
    x, latent = normal(2, tokens, 24), normal(2, tokens, 12)
    mask = made.select(x, latent, None, made.keys(x, None).unflatten(0, x.shape[:2]))
    assert mask.shape == (2, 1, tokens, tokens)
    assert torch.equal(mask[:, 0], defined(made, x, latent))
    assert torch.equal(mask.sum(-1)[0, 0], torch.arange(1, tokens + 1).clamp(max=6))


def test_a_later_query_chooses_among_all_keys() -> None:
    """With a cache the queries are the last of the keys."""
    made = indexer(16, 10, 6, 24, 12)
    x, latent = normal(1, 20, 24), normal(1, 20, 12)
    whole = made.select(x, latent, None, made.keys(x, None).unflatten(0, x.shape[:2]))
    assert torch.equal(made.select(x[:, 17:], latent[:, 17:], None, made.keys(x, None).unflatten(0, x.shape[:2])), whole[:, :, 17:])
