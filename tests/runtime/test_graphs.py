"""What is written before each replay, on the CPU: the same tensors and a plain call in the place of a recording."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.cli import main
from rtp_llm.kernels.paging import SAFE_PAGE, HostRows, PagedRows
from rtp_llm.layers.cache import CacheSize, PagedCache
from rtp_llm.runtime import graphs
from rtp_llm.runtime.generation import Generation, GenerationRequest, cache_size, generate_all
from rtp_llm.runtime.graphs import Capture, GraphDecoder, Work, batch_sizes, call_again, decoding, unrecordable
from tests.models import decoders, latents
from tests.models.reference import distance, make, token_ids
from tests.moe import variants as experts
from tests.quantization.formats import FORMATS
from tests.quantization.formats import make as make_format
from tests.support.plans import prepared
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

#: One of each way to attend: full, windowed, tables that depend on the length, latent, sparse, with states, with sinks.
VARIANTS = ["llama", "llama-longrope", "mistral-window", "qwen2-late-window", "v2-lite", "v32", "kimi-linear", "gpt_oss"]


def saved(variant: str, folder: Path) -> Any:
    if variant in decoders.VARIANTS:
        make(*decoders.configured(variant), folder)
    elif variant in experts.VARIANTS:
        experts.make(variant, folder)
    else:
        latents.save(variant, folder)
    return load_model(folder, device="cpu").model


class Poisoned:
    """A decoder in whose tensors nothing of the last pass survives: floats are NaN, and whole numbers are no page, cache_row, token or
    place that there is.  Pages that no sequence has are NaN too, but for the safe one."""

    def __init__(self, model: Any, cache: PagedCache, sizes: Sequence[int]) -> None:
        self.decoder, self.cache = GraphDecoder(model, cache, sizes, call_again), cache
        self.inactive = 0

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int], cache_rows: Sequence[int]) -> torch.Tensor:
        for fixed in self.decoder.fixed.values():
            for tensor in fixed.tensors():
                tensor.fill_(True if tensor.dtype == torch.bool else float("nan") if tensor.is_floating_point() else 2**40)
        free = self.cache._free  # which pages nobody has is the cache's own affair
        for pages in self.cache.pages:
            for tensor in pages:
                tensor[free] = float("nan")
        logits = self.decoder(tokens, cache_rows).clone()
        self._check(cache_rows)
        return logits

    def _check(self, cache_rows: Sequence[int]) -> None:
        """Every table after the pass: rows in use say what the cache says, all others the safe page, the spare cache row, one token."""
        rows = min(size for size in self.decoder.sizes if size >= len(cache_rows))
        self.inactive += rows - len(cache_rows)
        ids, cache_row, positions, places, lengths, tables = list(self.decoder.fixed[rows].tensors())[:6]
        live = len(cache_rows)
        assert cache_row.tolist() == [*cache_rows, *[self.cache.spare] * (rows - live)]
        assert lengths.tolist() == [*self.cache.lengths(cache_rows), *[1] * (rows - live)]
        assert positions[:, 0].tolist() == [length - 1 for length in lengths.tolist()]
        assert not ids[live:].any() and (tables[live:] == SAFE_PAGE).all() and (places[live:] < 16).all()
        assert tables.min() >= 0 and tables.max() <= self.cache.size.pages
        assert all(not pages[SAFE_PAGE].isnan().any() for layer in self.cache.pages for pages in layer)


@pytest.mark.parametrize("variant", VARIANTS)
def test_recorded_passes_are_plain_passes(variant: str, tmp_path: Path) -> None:
    """float32 logits within 1e-4 of an eager pass, for batches that fill a recording and for those that do not, in any order of
    rows, over the end of a page, while sequences come and go."""
    model = saved(variant, tmp_path)
    ids = token_ids(3, 24)
    size = CacheSize(rows=3, pages=6, max_length=30)
    plain, fixed = model.cache_of(size), model.cache_of(size)
    decoder = Poisoned(model, fixed, (1, 4))
    with torch.inference_mode():
        for cache_row, length in enumerate((14, 5, 17)):
            for cache in (plain, fixed):
                assert cache.take() == cache_row
                model(ids[cache_row : cache_row + 1, :length], cache, [cache_row])
        for step, cache_rows in enumerate(([0, 1, 2], [2, 0], [1], [0, 1, 2], [0])):
            if step == 2:
                for cache in (plain, fixed):
                    cache.release(0)
                    assert cache.take() == 0
            tokens = ids[cache_rows, 18 + step].tolist()
            wanted = model(torch.tensor(tokens)[:, None], plain, cache_rows)[:, -1]
            assert distance(decoder(tokens, cache_rows), wanted) < 1e-4
    assert decoder.inactive == 1 + 2 + 0 + 1 + 0


def test_generation_by_recordings(tmp_path: Path) -> None:
    """Whole answers, with sequences that end at different times, are those of eager decoding."""
    model = load_model(save_tiny_llama(tmp_path, initializer_range=0.5), device="cpu").model
    asked = [GenerationRequest(tuple(range(3 + i, 9 + 2 * i)), 5 + 4 * i) for i in range(6)]
    cache = model.cache_of(cache_size(asked, 5))  # type: ignore[operator]
    decoder = Poisoned(model, cache, batch_sizes(5))
    answers = {e.index: e.answer for e in Generation(model, asked, cache, decoder=decoder).events() if e.answer is not None}
    assert [answers[i] for i in range(len(asked))] == generate_all(model, asked)
    assert decoder.inactive > 0


def test_a_pass_that_fails_leaves_the_cache(tmp_path: Path) -> None:
    """A replay that fails counts nothing, and the next one gives what it would have given."""
    model = saved("llama", tmp_path)
    ids = token_ids(1, 12)
    cache = model.new_cache(1, 40)
    calls = []

    def failing(work: Work) -> Work:
        def again() -> torch.Tensor:
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("device lost")
            return work()

        return again

    with torch.inference_mode():
        model(ids[:, :11], cache)
        decoder = GraphDecoder(model, cache, (1,), failing)
        with pytest.raises(RuntimeError, match="device lost"):
            decoder([5], [0])
        assert cache.length == 11
        assert distance(decoder(ids[0, 11:].tolist(), [0]), model(ids)[:, -1]) < 1e-4


def meta_step(folder: Path) -> torch.Tensor:
    """Logits of a decode step of a model without memory: whatever asks the host for a value of a tensor fails there."""
    model: Any = prepared(folder, LoadConfig(device="cpu", dtype="bfloat16")).model
    cache = model.cache_of(CacheSize(4, 8, 64))
    nobody = HostRows(1, (), (), torch.empty(0, cache.width, dtype=torch.int32)).padded(4, cache.width, cache.spare)
    meta = torch.device("meta")
    with torch.inference_mode():
        step = model.step(PagedRows.of(nobody, meta, fixed=True), cache)
        logits: torch.Tensor = model.compute(torch.zeros(4, 1, dtype=torch.long, device=meta), step)
    return logits


@pytest.mark.parametrize("variant", [*VARIANTS, "glm-lite", "qwen3_moe", "mixtral", *FORMATS])
def test_nothing_of_a_step_asks_the_host(variant: str, tmp_path: Path) -> None:
    """What is recorded cannot wait for the device: of every way to attend, of experts in bfloat16, of every quantised format."""
    if variant in FORMATS:
        make_format(FORMATS[variant], "llama", tmp_path)
    elif variant in experts.VARIANTS:
        experts.make(variant, tmp_path, dtype=torch.bfloat16)
    elif variant in decoders.VARIANTS:
        make(*decoders.configured(variant), tmp_path, dtype=torch.bfloat16)
    else:
        latents.save(variant, tmp_path, dtype=torch.bfloat16)
    assert meta_step(tmp_path).shape == (4, 1, 101)


def test_quantised_experts_ask_the_host(tmp_path: Path) -> None:
    """They are dequantised run by run: the layer says so, and so it is."""
    make_format(FORMATS["fp8-block"], "qwen3_moe", tmp_path)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        meta_step(tmp_path)
    model = prepared(tmp_path, LoadConfig(device="cpu", dtype="bfloat16")).model
    assert "one by one" in unrecordable(model, torch.device("cuda"))


def test_sizes_cover_every_batch() -> None:
    """Powers of two and the largest batch, so that at most half of the rows are idle."""
    assert batch_sizes(1) == (1,) and batch_sizes(8) == (1, 2, 4, 8) and batch_sizes(11) == (1, 2, 4, 8, 11)


def test_where_nothing_can_be_recorded_it_is_said(tmp_path: Path) -> None:
    """On the CPU decoding is eager, and the reason is there for whoever asked."""
    model = load_model(save_tiny_llama(tmp_path), device="cpu").model
    cache = model.cache_of(CacheSize(1, 1, 16))  # type: ignore[operator]
    assert decoding(model, cache).to_json() == {"used": False, "batch_sizes": [], "reason": "the device is cpu"}
    assert decoding(model, cache, graphs=False).reason == "not asked for"
    # What does not depend on this machine's device: what each family says of itself.
    assert unrecordable(model, torch.device("cuda")) == ""
    make_moe = tmp_path / "moe"
    latents.save("v3", make_moe)
    assert "experts are multiplied one by one" in unrecordable(load_model(make_moe, device="cpu").model, torch.device("cuda"))


def test_answers_of_one_token_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the longest answer is the prompt's own token, a GPU's memory and time are left alone; from two tokens on it records."""
    model: Any = load_model(save_tiny_llama(tmp_path), device="cpu").model
    cache = model.cache_of(CacheSize(2, 2, 32))
    monkeypatch.setattr(graphs, "unrecordable", lambda model, device: "")
    monkeypatch.setattr(graphs, "CudaCapture", lambda device: call_again)
    assert decoding(model, cache, longest=1).to_json() == {
        "used": False,
        "batch_sizes": [],
        "reason": "answers of one token take no decode step",
    }
    assert decoding(model, cache, longest=2).sizes == decoding(model, cache).sizes == (1, 2)


def test_the_command_knows_its_longest_answer(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--max_new_tokens 1`` is no matter of the device; with 2, the CPU is the reason again."""
    for new, reason in ((1, "answers of one token take no decode step"), (2, "the device is cpu")):
        arguments = ["generate", str(smollm2), "--raw", "--prompt", "1, 2,", "--max_new_tokens", str(new), "--device", "cpu", "--json"]
        assert main(arguments) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["cuda_graphs"]["reason"] == reason and document["new_tokens"] == new


def test_memory_that_is_short_leaves_plain_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process alone decodes without recordings where there is no memory for them."""
    model: Any = load_model(save_tiny_llama(tmp_path), device="cpu").model
    cache = model.cache_of(CacheSize(1, 2, 32))
    monkeypatch.setattr(graphs, "unrecordable", lambda model, device: "")
    monkeypatch.setattr(graphs, "CudaCapture", short_of_memory)
    way = decoding(model, cache)
    assert way.reason == "CUDA out of memory" and not way.sizes
    assert way.decoder([5], [cache.take()]).shape[0] == 1


def short_of_memory(device: torch.device) -> Capture:
    """Stands for a GPU that has no room for a recording."""

    def capture(work: Work) -> Work:
        raise torch.OutOfMemoryError("CUDA out of memory\nand more")

    return capture


def reason_on_rank(folder: str) -> tuple[str, str]:
    """Why a rank that meets others through gloo cannot record; and what it raises where it could, but for its memory."""
    model: Any = load_model(folder, device="cpu").model
    reason = unrecordable(model, torch.device("cuda"))
    with mock.patch.multiple(graphs, unrecordable=lambda model, device: "", CudaCapture=short_of_memory):
        try:
            return reason, decoding(model, model.cache_of(CacheSize(1, 2, 32))).reason
        except torch.OutOfMemoryError as error:
            return reason, type(error).__name__


def test_gloo_cannot_be_recorded(tmp_path: Path) -> None:
    """Ranks without a GPU each meet through gloo, whose collectives run on the host.  Where ranks could record, one that is short of
    memory fails, rather than decode by itself while the others wait for it."""
    save_tiny_llama(tmp_path)
    for result in run_ranks(2, reason_on_rank, str(tmp_path), timeout=120):
        reason, raised = result.value
        assert "gloo" in reason and raised == "OutOfMemoryError"
