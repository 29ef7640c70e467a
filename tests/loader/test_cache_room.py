"""A KV cache that does not fit beside the weights is refused before a byte of them is read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rtp_llm import load_model
from rtp_llm.config import LoadConfig
from rtp_llm.errors import PlanError
from rtp_llm.layers.cache import CacheSize
from rtp_llm.loader.budget.cache import check_cache
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.prepare import prepare
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def test_a_cache_beyond_memory_is_refused_before_weights_are_read(tiny: Path) -> None:
    """Terabytes of cache for a model of kilobytes: an error, at once."""

    class Untouched:
        def start(self, total_bytes: int) -> None:
            raise AssertionError("weights were read")

        advance = start

        def stop(self) -> None:
            pass

    with pytest.raises(PlanError, match="OUT_OF_MEMORY: the weights and the KV cache do not fit on cpu.*what fits"):
        load_model(tiny, device="cpu", progress=Untouched(), cache=lambda: CacheSize.equal(10_000, 1_000_000))
    assert load_model(tiny, device="cpu", cache=lambda: CacheSize.equal(4, 64)).model.new_cache(4, 64)


@pytest.mark.parametrize(("slots", "length"), [(8, 256), (1000, 16), (1, 4096)])
def test_sizes_that_are_named_do_fit(slots: int, length: int, tiny: Path) -> None:
    """As many sequences of the same length, or as many tokens for the same number; one more of either does not."""
    context = planning_context(tiny, settings=LoadConfig(device="cpu"))
    prepared = prepare(context)
    size = CacheSize.equal(slots, length)

    def fits(other: CacheSize) -> bool:
        try:
            check_cache(context, other, prepared, free=free)
        except PlanError as error:
            messages.append(str(error))
            return False
        return True

    messages: list[str] = []
    model = prepared.model
    free = prepared.plan.bytes_resident + size.nbytes(model.cache_shapes, model.dtype) * 2 // 3  # type: ignore[attr-defined,operator,arg-type]
    assert not fits(size)
    found = re.search(r"what fits: (?:(\d+) sequence.*?, or )?(\d+) of (\d+) tokens|what fits: (\d+) sequence", messages[0])
    assert found is not None, messages[0]
    if found[1]:
        assert fits(CacheSize.equal(int(found[1]), length)) and not fits(CacheSize.equal(int(found[1]) + 1, length))
    if found[3]:
        assert fits(CacheSize.equal(slots, int(found[3]))) and not fits(CacheSize.equal(slots, int(found[3]) + 1))


def refused(folder: str) -> str:
    """What a rank is told."""
    try:
        load_model(folder, device="cpu", cache=lambda: CacheSize.equal(10_000, 1_000_000))
    except PlanError as error:
        return str(error)
    return ""


def test_all_ranks_are_told(tiny: Path) -> None:
    """Ranks that share a device are added up, and hear the same."""
    results = [result.value for result in run_ranks(2, refused, str(tiny), timeout=120)]
    assert results[0] == results[1] and "2 rank(s)" in results[0]
