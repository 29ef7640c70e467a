"""Attention over pages against its definition; what layers declare of it; and what flashinfer is told of a pass."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm.kernels.attention import TORCH_ATTENTION, AttentionCall, AttentionNeed, LatentCall, LatentNeed, TorchPlan
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.flashinfer_attention import _DECODE_PLAN, _MLA_PLAN, _PREFILL_PLAN, FlashInferAttention, _partial_bytes
from rtp_llm.kernels.interface import kernel_needs
from rtp_llm.kernels.paging import PAGE_SIZE, HostRows, PagedRows
from rtp_llm.kernels.symbols import called
from tests.models import latents
from tests.support.tiny import save_tiny_llama

CPU = torch.device("cpu")
F64 = torch.float64
BF16 = torch.bfloat16


def rows_of(past: tuple[int, ...], tokens: int, fixed: bool = False) -> PagedRows:
    """Rows whose pages lie in any order; ids behind a row's pages are out of range."""
    width = max(-(-(p + tokens) // PAGE_SIZE) for p in past) + 1
    order = (torch.randperm(len(past) * width, generator=torch.Generator().manual_seed(len(past))) + 1).view(len(past), width).int()
    for row, p in enumerate(past):
        order[row, -(-(p + tokens) // PAGE_SIZE) :] = 2**30
    return PagedRows.of(HostRows(tokens, tuple(range(len(past))), past, order), CPU, fixed=fixed)


def laid(rows: PagedRows, *shape: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Pages that are NaN but for the rows' tokens, and each row's tokens in order."""
    pages = torch.full((len(rows.cache_rows) * rows.tables.shape[1] + 1, PAGE_SIZE, *shape), float("nan"), dtype=F64)
    each = []
    for row, length in enumerate(rows.lengths.tolist()):
        values = torch.randn(length, *shape, dtype=F64, generator=torch.Generator().manual_seed(row + shape[-1]))
        for position in range(length):
            pages[rows.tables[row, position // PAGE_SIZE], position % PAGE_SIZE] = values[position]
        each.append(values)
    return pages, each


def defined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """One row, one query and one head at a time: the queries are the last of the tokens."""
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=F64)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        at = len(k) - q.shape[0] + t
        seen = slice(max(0, at + 1 - (window or len(k))), at + 1)
        for h in range(q.shape[1]):
            scores = (k[seen, h // group] @ q[t, h]) * scale
            if sinks is not None:
                scores = torch.cat((scores, sinks[h, None]))
            out[t, h] = scores.softmax(-1)[: len(v[seen])] @ v[seen, h // group]
    return out


@pytest.mark.parametrize("past", [(0, 0), (20, 20), (0, 15, 16, 33), (5,)])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("window", [None, 3, 18])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
def test_torch_attends_as_defined(past: tuple[int, ...], tokens: int, window: int | None, fixed: bool, sunk: bool) -> None:
    """Grouped heads, windows, sinks, rows of all lengths, over the ends of pages; nothing but a row's own tokens is looked at."""
    rows = rows_of(past, tokens, fixed)
    (k_pages, keys), (v_pages, values) = laid(rows, 2, 8), laid(rows, 2, 8)
    q = torch.randn(len(past) * tokens, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(9))
    sinks = torch.tensor([-2.0, 0.0, 1.0, 2.0, 300.0, -300.0], dtype=F64) if sunk else None
    call = AttentionCall(6, 2, 8, F64, window, sunk)
    out = TORCH_ATTENTION.attend(TORCH_ATTENTION.plan(call, rows), q, k_pages, v_pages, sinks)
    for row, part in enumerate(q.split(tokens)):
        torch.testing.assert_close(out.split(tokens)[row], defined(part, keys[row], values[row], window, 8**-0.5, sinks))


def test_prompts_with_sinks_go_in_blocks() -> None:
    """A prompt of 150 tokens, of which scores are there for 64 at a time, with a window and without."""
    rows = rows_of((0,), 150)
    (k_pages, (keys,)), (v_pages, (values,)) = laid(rows, 2, 8), laid(rows, 2, 8)
    q = torch.randn(150, 6, 8, dtype=F64, generator=torch.Generator().manual_seed(9))
    sinks = torch.linspace(-2, 2, 6, dtype=F64)
    for window in (None, 70):
        call = AttentionCall(6, 2, 8, F64, window, True)
        wanted = defined(q, keys, values, window, 8**-0.5, sinks)
        torch.testing.assert_close(TORCH_ATTENTION.attend(TORCH_ATTENTION.plan(call, rows), q, k_pages, v_pages, sinks), wanted)


@pytest.mark.parametrize("tokens", [1, 3])
def test_torch_attends_to_latents_as_defined(tokens: int) -> None:
    """One key for all heads, of latent and rotated part; the latent is the value."""
    rows = rows_of((0, 17, 30), tokens)
    (latent_pages, latent), (rope_pages, rope) = laid(rows, 12), laid(rows, 4)
    generator = torch.Generator().manual_seed(3)
    q_latent, q_rope = (torch.randn(3 * tokens, 5, size, dtype=F64, generator=generator) for size in (12, 4))
    plan = TORCH_ATTENTION.plan(LatentCall(5, 12, 4, 0.3, F64), rows)
    out = TORCH_ATTENTION.attend_latent(plan, q_latent, q_rope, latent_pages, rope_pages)
    for row, part in enumerate(torch.cat((q_latent, q_rope), -1).split(tokens)):
        keys = torch.cat((latent[row], rope[row]), -1)[:, None]
        torch.testing.assert_close(out.split(tokens)[row], defined(part, keys, latent[row][:, None], None, 0.3))


class Told:
    """Stands for a wrapper, which cannot be made without a GPU: takes what the real one's ``plan`` takes."""

    def __init__(self, symbol: Any) -> None:
        self._symbol = symbol
        self.arguments: dict[str, Any] = {}

    def plan(self, **arguments: Any) -> None:
        inspect.signature(called(self._symbol)).bind(None, **arguments)
        assert set(arguments) == set(self._symbol.keywords)
        self.arguments = arguments


@pytest.mark.parametrize(("tokens", "symbol"), [(1, _DECODE_PLAN), (5, _PREFILL_PLAN)])
def test_what_flashinfer_is_told(tokens: int, symbol: Any) -> None:
    """Pages of each row alone, in order, how full the last one is, and a window counted to the left of a token; by the names of
    the installed version's own parameters, on the CPU, where it looks at them."""
    rows = rows_of((0, 15, 40), tokens)
    told = Told(symbol)
    FlashInferAttention().renew(told, AttentionCall(32, 8, 128, BF16, window=100), rows)  # type: ignore[arg-type]
    said = told.arguments
    indptr, indices, last = (
        next(said[name] for name in names if name in said)
        for names in (("indptr", "paged_kv_indptr"), ("indices", "paged_kv_indices"), ("last_page_len", "paged_kv_last_page_len"))
    )
    lengths = rows.lengths.tolist()
    assert all(tensor.dtype == torch.int32 and tensor.device == CPU for tensor in (indptr, indices, last))
    for row, length in enumerate(lengths):
        pages = indices[indptr[row] : indptr[row + 1]].tolist()
        assert pages == rows.tables[row, : math.ceil(length / PAGE_SIZE)].tolist()
        assert (len(pages) - 1) * PAGE_SIZE + last[row] == length
    assert indptr[-1] == len(indices) and said["window_left"] == 99 and said["sm_scale"] == 128**-0.5
    if tokens > 1:
        assert said["qo_indptr"].tolist() == [0, 5, 10, 15] and said["causal"]


def test_what_flashinfer_is_told_of_latents() -> None:
    """Lengths instead of last pages; of prompts nothing, since torch expands their latents."""
    rows = rows_of((0, 15, 40), 1)
    told, call = Told(_MLA_PLAN), LatentCall(16, 512, 64, 0.1, BF16)
    FlashInferAttention().renew(told, call, rows)  # type: ignore[arg-type]
    said = told.arguments
    assert said["kv_len_arr"].tolist() == rows.lengths.tolist() == [1, 16, 41] and said["qo_indptr"].tolist() == [0, 1, 2, 3]
    assert said["kv_indptr"][-1] == len(said["kv_indices"]) and (said["head_dim_ckv"], said["head_dim_kpe"]) == (512, 64)
    assert isinstance(FlashInferAttention().plan(call, rows_of((0, 15, 40), 5)), TorchPlan)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "processors", "taken"),
    [
        (64, 8, 128, 132, 135266304),
        (64, 8, 128, 108, 109903872),
        (28, 4, 128, 148, 136851456),
        (16, 1, 128, 132, 278986752),
        (64, 4, 64, 132, 140574720),
        (16, 1, 256, 148, 311590912),
        (32, 32, 128, 132, 16908288),
    ],
)
def test_work_space_holds_every_prompt(heads: int, kv_heads: int, dim: int, processors: int, taken: int) -> None:
    """``taken`` bytes are the most that flashinfer 0.6.6's own planner (``PrefillSplitQOKVIndptr``, compiled) asked for over one to four
    prompts of 80 to 3000 tokens: more than its documentation's 128 MiB, without which it refuses the pass.  Not much is wasted."""
    said = _partial_bytes(AttentionCall(heads, kv_heads, dim, BF16), 1, processors)
    assert taken <= said <= 1.05 * taken + (2 << 20)


@pytest.mark.parametrize(
    ("need", "word"),
    [
        (AttentionNeed("attention.decode", BF16, AttentionCall(9, 3, 64, BF16)), ""),
        (AttentionNeed("attention.prefill", BF16, AttentionCall(28, 4, 128, BF16, 4096)), ""),
        (AttentionNeed("attention.prefill", BF16, AttentionCall(8, 8, 96, BF16)), "heads of 96"),
        (AttentionNeed("attention.decode", BF16, AttentionCall(71, 1, 64, BF16)), "71 query heads"),
        (AttentionNeed("attention.prefill", BF16, AttentionCall(64, 8, 64, BF16, 128, True)), "with sinks"),
        (AttentionNeed("attention.decode", BF16, AttentionCall(64, 8, 64, BF16, sinks=True)), "with sinks"),
        (LatentNeed("mla.decode", BF16, LatentCall(16, 512, 64, 0.1, BF16), False), ""),
        (LatentNeed("mla.decode", BF16, LatentCall(16, 512, 64, 0.1, BF16), True), "sparse"),
        (LatentNeed("mla.decode", BF16, LatentCall(16, 256, 64, 0.1, BF16), False), "latents of 256"),
    ],
)
def test_sizes_that_flashinfer_has(need: Any, word: str) -> None:
    """SmolLM2, Qwen2 and DeepSeek as published have kernels; other sizes, sparse attention, and sinks are said not to."""
    limit = FLASHINFER.functions[need.op].limit(need)
    assert word in limit and bool(word) == bool(limit)
    assert str(need.call.heads) in need.text


def test_layers_declare_how_they_attend(tmp_path: Path) -> None:
    """Prefill and decode of heads, once for all layers alike; latents once for both; nothing for layers without a cache."""
    from rtp_llm import load_model

    def declared(folder: Path) -> list[Any]:
        return [n for n in kernel_needs(load_model(folder, device="cpu").model) if isinstance(n, (AttentionNeed, LatentNeed))]

    ops = [need.op for need in declared(save_tiny_llama(tmp_path / "llama"))]
    assert ops == ["attention.prefill", "attention.decode"]
    for variant, sparse in (("v3", False), ("v32", True), ("kimi-linear", False)):
        latents.save(variant, tmp_path / variant)
        (need,) = declared(tmp_path / variant)
        assert (need.op, need.sparse, need.call.latent_dim, need.call.rope_dim) == ("mla.decode", sparse, 20, 8)
