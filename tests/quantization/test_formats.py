"""Every format, dense and with experts: loaded weights are what the oracle says, and so are logits, shards and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, export_checkpoint, load_model
from tests.models.reference import distance, token_ids
from tests.quantization.compressed import EVERY
from tests.quantization.formats import MODELS, check_weights, dense_weights, digest, make

CPU = LoadConfig(device="cpu")


@pytest.mark.parametrize("model", sorted(MODELS))
@pytest.mark.parametrize("name", sorted(EVERY))
def test_weights_logits_shards_and_export(name: str, model: str, tmp_path: Path) -> None:
    """Dequantised weights equal the oracle's bit for bit, whole, at TP 2 and at EP 2; logits equal those of transformers with
    the oracle's weights; every place equals what safetensors reads; and the export is the source again, byte for byte."""
    folder = tmp_path / "source"
    oracle = make(EVERY[name], model, folder)
    loaded = load_model(folder, load=LoadConfig(device="cpu", dtype="float32", verify=True))
    wanted = dense_weights(oracle, tmp_path / "oracle")
    assert check_weights(loaded, wanted) == {"llama": 14, "qwen3_moe": 32}[model]
    with torch.inference_mode():
        assert distance(loaded.model(token_ids()), oracle(token_ids()).logits) < 1e-4
    shards = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]
    if model == "qwen3_moe":
        shards += [ParallelConfig(ep_size=2, ep_rank=rank) for rank in range(2)]
    for shard in shards:
        assert check_weights(load_model(folder, parallel=shard, load=CPU), wanted) > 0
    out = export_checkpoint(loaded, tmp_path / "out")
    assert digest(out) == digest(folder)
