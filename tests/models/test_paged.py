"""Sequences of different lengths in one cache: each family's logits are those of the sequence alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.layers.cache import CacheSize
from rtp_llm.layers.faults import ForwardError
from tests.models import decoders, latents
from tests.models.reference import distance, make, token_ids
from tests.moe import variants as experts

#: One of each way to attend: full, windowed, mixed, tables that depend on the length, latent, sparse, with states, with sinks.
VARIANTS = [
    "llama",
    "llama-longrope",
    "llama-dynamic",
    "mistral-window",
    "qwen2-late-window",
    "qwen3-tied-biases",
    "v2-lite",
    "v3-yarn",
    "v32",
    "glm-lite",
    "kimi-linear",
    "gpt_oss",
]

#: Tokens of each sequence before any is decoded: on both sides of a page's end.
PROMPTS = (3, 17, 9)
DECODED = 6


def saved(variant: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The loaded model of a variant."""
    if variant in decoders.VARIANTS:
        make(*decoders.configured(variant), folder, dtype=dtype)
    elif variant in experts.VARIANTS:
        experts.make(variant, folder, dtype=dtype)
    else:
        latents.save(variant, folder, dtype=dtype)
    return load_model(folder, device="cpu").model


@torch.inference_mode()
def alone(model: Any, ids: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits of one sequence, its prompt at once and then token by token."""
    cache = model.new_cache(1, len(ids))
    steps = [prompt] + [1] * (len(ids) - prompt)
    return torch.cat([model(part[None], cache)[0] for part in ids.split(steps)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_unequal_lengths_are_each_alone(variant: str, tmp_path: Path) -> None:
    """Prompts one by one, then all decoded together: float32 logits of each within 1e-4 of those of the sequence alone."""
    model = saved(variant, tmp_path)
    ids = token_ids(len(PROMPTS), max(PROMPTS) + DECODED)
    cache = model.new_cache(len(PROMPTS), ids.shape[1])
    got: list[list[torch.Tensor]] = []
    with torch.inference_mode():
        for cache_row, prompt in enumerate(PROMPTS):
            got.append([model(ids[cache_row : cache_row + 1, :prompt], cache, [cache_row])[0]])
        for step in range(DECODED):
            # The order of rows is the caller's affair.
            order = [2, 0, 1] if step % 2 else [0, 1, 2]
            tokens = torch.stack([ids[cache_row, PROMPTS[cache_row] + step] for cache_row in order])[:, None]
            for cache_row, logits in zip(order, model(tokens, cache, order), strict=True):
                got[cache_row].append(logits)
    for cache_row, prompt in enumerate(PROMPTS):
        assert distance(torch.cat(got[cache_row]), alone(model, ids[cache_row, : prompt + DECODED], prompt)) < 1e-4


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "v32", "kimi-linear", "gpt_oss"])
def test_a_cache_row_serves_again(variant: str, tmp_path: Path) -> None:
    """What a released sequence left in its pages, were it NaN, is no part of the next one, nor of its neighbour."""
    model = saved(variant, tmp_path)
    ids = token_ids(2, 20)
    cache = model.cache_of(CacheSize(rows=2, pages=4, max_length=24))
    first, second = cache.take(), cache.take()
    with torch.inference_mode():
        model(ids, cache, [first, second])
        cache.release(first)
        for layer in range(len(cache.pages)):
            for pages in cache.pages[layer]:
                pages[1:3] = float("nan")
            for state in cache.states[layer]:
                state[first] = float("nan")
        again = cache.take()
        assert again == first
        model(ids[:1, :9], cache, [again])
        # Together, so that the shorter one's row reaches over unused places.
        both = model(torch.stack((ids[0, 9:11], ids[1, :2])), cache, [again, second])
        assert distance(both[:1], model(ids[:1, :11])[:, 9:]) < 1e-4
        assert distance(both[1:], model(torch.cat((ids[1:], ids[1:, :2]), dim=1))[:, 20:]) < 1e-4


@pytest.mark.parametrize("variant", ["llama", "v3", "kimi-linear"])
def test_a_pass_that_fails_half_way_leaves_the_cache(variant: str, tmp_path: Path) -> None:
    """The last layer's failure undoes what the first layers have written: the next pass gives what it would have given."""
    model = saved(variant, tmp_path)
    ids = token_ids(1, 20)
    cache = model.new_cache(1, 40)

    def fail(*_: Any) -> None:
        raise RuntimeError("device lost")

    with torch.inference_mode():
        model(ids[:, :15], cache)
        books = cache.length, cache.free_pages
        hook = model.layers[-1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="device lost"):
            model(token_ids(1, 21)[:, 1:], cache)
        hook.remove()
        assert (cache.length, cache.free_pages) == books
        assert distance(model(ids[:, 15:], cache), model(ids)[:, 15:]) < 1e-4


def test_without_pages_nothing_begins(tmp_path: Path) -> None:
    """The error says how many pages are wanted and free, and the sequences go on as soon as there are some."""
    model = saved("llama", tmp_path)
    ids = token_ids(2, 20)
    cache = model.cache_of(CacheSize(rows=2, pages=3, max_length=32))
    cache_rows = [cache.take(), cache.take()]
    with torch.inference_mode():
        model(ids[:, :16], cache, cache_rows)
        with pytest.raises(ForwardError, match=r"NO_PAGES.*2 free pages.*1 of 3"):
            model(ids[:, 16:17], cache, cache_rows)
        assert cache.lengths(cache_rows) == [16, 16]
        cache.release(cache_rows[1])
        assert distance(model(ids[:1, 16:], cache, cache_rows[:1]), model(ids[:1])[:, 16:]) < 1e-4


@pytest.mark.parametrize("variant", ["v3", "v32"])
def test_quantised_latents_decode_alike(variant: str, tmp_path: Path) -> None:
    """Where what expands latents is held in FP8, decoding multiplies by the same numbers as a whole pass does."""
    latents.save(variant, tmp_path)
    model: Any = load_model(tmp_path, device="cpu", load=LoadConfig(quantization="inline-fp8-channel")).model
    assert model.layers[0].attn.kv_b.held
    ids = token_ids(2, 20)
    cache = model.new_cache(2, 20)
    with torch.inference_mode():
        stepped = torch.cat([model(part, cache) for part in ids.split([15, 1, 1, 3], dim=1)], dim=1)
        assert distance(stepped, model(ids)) < 1e-4


def test_the_last_logits_alone(tmp_path: Path) -> None:
    """``last`` spares the product with the vocabulary for all tokens but the last one."""
    model = saved("llama", tmp_path)
    with torch.inference_mode():
        assert distance(model(token_ids(), last=True), model(token_ids())[:, -1:]) < 1e-5
