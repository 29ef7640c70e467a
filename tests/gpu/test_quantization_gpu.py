"""Quantised weights on one GPU: the same bits as on the CPU, FP8 made there with the same codes, products on codes.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, export_checkpoint, load_model
from rtp_llm.layers.linear import Linear
from rtp_llm.quantization.faults import QuantizationError
from rtp_llm.quantization.scaled import Grid
from tests.models.reference import closeness, distance, token_ids
from tests.quantization.formats import FORMATS, Format, check_weights, dense_weights, digest, make
from tests.quantization.grids import on
from tests.support.tiny import save_tiny_llama

pytestmark = pytest.mark.gpu

#: One of each scheme, none of which needs the format's own library.
OURS = ("fp8-block", "fp8-block-ue8m0", "fp8-static", "gptq-order", "awq", "modelopt-nvfp4")
#: Those for which compressed-tensors itself is the oracle.
COMPRESSED = ("ct-fp8-channel", "ct-mxfp8", "ct-w4a8", "ct-w4a16-asym", "ct-mxfp4")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_weights_logits_and_export(name: str, model: str, tmp_path: Path) -> None:
    """See :func:`check_all`."""
    check_all(FORMATS[name], model, tmp_path)


@pytest.mark.parametrize("name", COMPRESSED)
def test_weights_that_compressed_tensors_wrote(name: str, tmp_path: Path) -> None:
    """The same for what needs that library, where it is installed; all of these run on every CPU."""
    pytest.importorskip("compressed_tensors")
    from tests.quantization.compressed import EVERY

    check_all(EVERY[name], "llama", tmp_path)


def check_all(form: Format, model: str, tmp_path: Path) -> None:
    """Every place is what a second reader finds; dequantised weights equal the oracle's, computed on the CPU, to the last bit of float32;
    float32 logits are the oracle's; the export is the source."""
    folder = tmp_path / "source"
    oracle = make(form, model, folder)
    loaded = load_model(folder, load=LoadConfig(device="cuda", dtype="float32", verify=True))
    wanted = {key: tensor.cuda() for key, tensor in dense_weights(oracle, tmp_path / "oracle").items()}
    assert check_weights(loaded, wanted) > 0
    with torch.inference_mode():
        assert distance(loaded.model(token_ids().cuda()).cpu(), oracle(token_ids()).logits) < 1e-3
    assert digest(export_checkpoint(loaded, tmp_path / "out")) == digest(folder)


@pytest.mark.parametrize("grid", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_made_on_the_device(grid: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors that arrive in many parts over several streams: codes and scales are those that the CPU makes, and the peak on the device
    stays below the prediction and far below that of plain weights."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 512}
    folder = save_tiny_llama(tmp_path / "model", dtype=dtype, num_key_value_heads=4, **sizes)
    method = f"inline-fp8-{grid}"
    on_cpu = load_model(folder, load=LoadConfig(device="cpu", quantization=method))
    loaded = load_model(folder, load=LoadConfig(device="cuda", quantization=method, buffer_mib=1, reader_threads=4, verify=True))
    for (name, one), (_, other) in zip(on_cpu.model.named_parameters(), loaded.model.named_parameters(), strict=True):
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.cpu().reshape(-1).view(torch.uint8)), name
    measured, plan = loaded.report.measured_peak_bytes, loaded.plan
    assert measured is not None
    # torch's allocator rounds each tensor up, by less than 2 MiB.
    assert plan.bytes_resident <= measured <= loaded.report.budget.peak + 2 * 2**20 * len(plan.model.params)


@pytest.mark.parametrize("grid", ["tensor", "channel", (128, 128)])
def test_making_waits_for_nothing(grid: Grid) -> None:
    """Making codes on the device is queued: torch reports no operation that would have waited for it; whole steps and many."""
    for step in (2**30, 2**20):
        transform, content, region, places = on((1000, 1030), grid, "cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            transform.derive(content, region, places, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        same = on((1000, 1030), grid, "cpu")
        same[0].derive(content.cpu(), region, same[3], step)
        for (_, _, made), (_, _, wanted) in zip(places, same[3], strict=True):
            assert torch.equal(made.cpu().view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("grid", ["tensor", "channel", "block"])
def test_weights_that_are_no_numbers(grid: str, tmp_path: Path) -> None:
    """A NaN in a matrix is found on the device too."""
    folder = save_tiny_llama(tmp_path / "model", dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuantizationError, match="BAD_SCALE.*model.layers.1.mlp.up_proj.weight"):
        load_model(folder, load=LoadConfig(device="cuda", quantization=f"inline-fp8-{grid}"))


def test_reserved_memory(tmp_path: Path) -> None:
    """Many reader threads share one pool of memory for what they make: what torch takes from the device is what is predicted, and
    what its allocator rounds up to: 20 MiB for blocks of less than 10, 2 MiB for others."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 16, "vocab_size": 512}
    folder = save_tiny_llama(tmp_path / "model", dtype=torch.bfloat16, num_key_value_heads=4, **sizes)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    loaded = load_model(folder, load=LoadConfig(device="cuda", quantization="inline-fp8-tensor", reader_threads=12))
    taken = torch.cuda.max_memory_reserved() - before
    assert taken <= loaded.report.budget.peak + 20 * 2**20 * 4 + 2 * 2**20 * len(loaded.plan.model.params)


def test_products_on_codes(tmp_path: Path) -> None:
    """Dense FP8 layers with a scale a row run on the codes: logits point where those of dequantised weights point."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8 product")
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "vocab_size": 512}
    folder = save_tiny_llama(tmp_path / "model", dtype=torch.bfloat16, num_key_value_heads=4, **sizes)
    loaded = load_model(folder, load=LoadConfig(device="cuda", quantization="inline-fp8-channel"))
    layers = [module for module in loaded.model.modules() if isinstance(module, Linear)]
    assert all(layer.products for layer in layers)
    ids = token_ids(vocab=512).cuda()
    with torch.inference_mode():
        on_codes = loaded.model(ids)
        for layer in layers:
            layer.products.clear()
        assert closeness(on_codes, loaded.model(ids)) > 0.98
