"""Every format, dense and with experts: loaded weights are what the oracle says, and so are logits, shards and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, export_checkpoint, load_model
from rtp_llm.errors import RtpLlmError
from tests.models.reference import distance, token_ids
from tests.quantization.compressed import EVERY
from tests.quantization.formats import MODELS, Tensors, check_weights, dense_weights, digest, make

CPU = LoadConfig(device="cpu")


#: Blocks of 128 rows, where phi3's checkpoints here hold matrices of 192, 64 and 320 rows above one another.
STRADDLING = {"fp8-block", "fp8-block-ue8m0", "ct-fp8-block"} & EVERY.keys()


@pytest.mark.parametrize(("name", "model"), [(n, m) for n in sorted(EVERY) for m in sorted(MODELS) if m != "phi3" or n not in STRADDLING])
def test_weights_logits_shards_and_export(name: str, model: str, tmp_path: Path) -> None:
    """Dequantised weights equal the oracle's bit for bit, whole, at TP 2 and at EP 2; logits equal those of transformers with
    the oracle's weights; every place equals what safetensors reads; and the export is the source again, byte for byte."""
    folder = tmp_path / "source"
    oracle = make(EVERY[name], model, folder)
    loaded = load_model(folder, load=LoadConfig(device="cpu", dtype="float32", verify=True))
    wanted = dense_weights(oracle, tmp_path / "oracle")
    assert check_weights(loaded, wanted) == {"llama": 14, "phi3": 14, "qwen3_moe": 32}[model]
    with torch.inference_mode():
        assert distance(loaded.model(token_ids()), oracle(token_ids()).logits) < 1e-4
    shards = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]
    if model == "qwen3_moe":
        shards += [ParallelConfig(ep_size=2, ep_rank=rank) for rank in range(2)]
    for shard in shards:
        assert check_weights(load_model(folder, parallel=shard, load=CPU), wanted) > 0
    out = export_checkpoint(loaded, tmp_path / "out")
    assert digest(out) == digest(folder)


@pytest.mark.parametrize("name", sorted(STRADDLING))
def test_a_block_of_two_fused_matrices_is_refused(name: str, tmp_path: Path) -> None:
    """A scale that stands for rows of two matrices cannot be cut, and is not guessed at; each tensor is named once."""
    make(EVERY[name], "phi3", tmp_path)
    with pytest.raises(RtpLlmError, match="an element stands for rows of two of them") as caught:
        load_model(tmp_path, load=CPU)
    named = [problem.tensor or "" for problem in caught.value.problems]
    assert len(named) == len({*named}) == 4
    assert all("weight_scale" in tensor for tensor in named)


@pytest.mark.parametrize(("name", "wrong"), [("fp8-tensor", "weight_scale"), ("fp8-static", "input_scale")])
def test_one_number_for_each_fused_matrix_is_refused(name: str, wrong: str, tmp_path: Path) -> None:
    """The format has one scale for a tensor; a file with one for each of the matrices in it means something else."""

    def each(tensors: Tensors) -> None:
        for key, value in tensors.items():
            if key.endswith(f"gate_up_proj.{wrong}"):
                tensors[key] = value.reshape(1).repeat(2)

    make(EVERY[name], "phi3", tmp_path, change=each)
    with pytest.raises(RtpLlmError, match=rf"gate_up_proj\.{wrong}\).*found \[2\]"):
        load_model(tmp_path, load=CPU)
