"""Decoding by CUDA graphs on two GPUs: collectives over NCCL are recorded with the rest.

Tagged ``multi_gpu``: ``make pytest ARGS="-m multi_gpu tests/gpu/test_decode_multi_gpu.py"`` on a machine with two GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rtp_llm import LoadConfig, load_model
from rtp_llm.runtime.generation import Generation, GenerationRequest, cache_size
from rtp_llm.runtime.graphs import decoding
from rtp_llm.runtime.sampling import Sampling
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

pytestmark = pytest.mark.multi_gpu


def answers(folder: str, sampling: Sampling) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], tuple[int, ...]]:
    """One rank: answers by plain passes and by graphs, and the sizes of batch that were recorded."""
    model: Any = load_model(folder, load=LoadConfig(device="cuda", timeout_s=60)).model
    requests = [GenerationRequest(tuple(range(3 + i, 9 + 2 * i)), 5 + 4 * i, sampling) for i in range(6)]
    found = []
    sizes: tuple[int, ...] = ()
    for graphs in (False, True):
        cache = model.cache_of(cache_size(requests, 5))
        way = decoding(model, cache, graphs=graphs)
        generation = Generation(model, requests, cache, decoder=way.decoder)
        told = {event.index: event.answer.ids for event in generation.events() if event.answer is not None}
        found.append([told[i] for i in range(len(requests))])
        sizes = way.sizes
    return found[0], found[1], sizes


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, top_k=20, top_p=0.9, seed=11)], ids=["greedy", "sampled"])
def test_two_gpus_decode_by_graphs(sampling: Sampling, tmp_path: Path) -> None:
    """Both ranks give the same answers, with graphs and without, greedy or drawn, while sequences come and go."""
    folder = str(save_tiny_llama(tmp_path, initializer_range=0.5, hidden_size=384))
    first, second = [result.value for result in run_ranks(2, answers, folder, sampling, timeout=180)]
    assert first == second
    plain, recorded, sizes = first
    assert plain == recorded and sizes == (1, 2, 4, 5)
