"""Values are checked by their extremes, read once for the whole model: the same verdict as looking at every element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rtp_llm import LoadConfig, load_model
from rtp_llm.loader.budget.budget import scratch_budget
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.fill.finish import finish
from rtp_llm.loader.prepare import prepare
from rtp_llm.quantization.limits import DeferredChecks, ExactValues, holds, scale_limit
from rtp_llm.quantization.scheme import bad_scales
from tests.quantization.formats import FORMATS, make

BAD = (float("nan"), float("inf"), -float("inf"), -1.0, -1e-45)
GOOD = (0.0, 1e-45, 1.0, 3e38)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scales_of_floats(dtype: str) -> None:
    """One bad number anywhere among good ones is found, whatever it is; zeros, tiny and huge ones are good."""
    kind = getattr(torch, dtype)
    good = torch.tensor(GOOD).clamp_max(torch.finfo(kind).max).to(kind)
    for bad in (None, *BAD):
        for place in range(len(good)):
            scales = good.clone()
            if bad is not None:
                scales[place] = bad
            expect(scales, dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e8m0fnu", "uint8"])
def test_scales_of_eight_bits(dtype: str) -> None:
    """Every byte but those of E4M3's minus zero, which scale nothing either way."""
    for byte in range(256):
        if (dtype, byte) != ("float8_e4m3fn", 0x80):
            expect(torch.tensor([0, byte, 1], dtype=torch.uint8).view(getattr(torch, dtype)), dtype)


def expect(scales: torch.Tensor, dtype: str) -> None:
    """The extremes say what a look at every element says."""
    checks = DeferredChecks()
    seen = checks.extremes(scales)
    (found,) = checks.read([seen])
    assert holds(scale_limit(dtype), found) == (not list(bad_scales({"scale": scales}, "scale"))), scales


def test_exact_numbers() -> None:
    """Several dtypes in one look; numbers that have to be these, and are not."""
    checks = DeferredChecks()
    seen = [checks.add(torch.tensor([3, 4])), checks.extremes(torch.tensor([2.0, -1.0])), checks.add(torch.tensor([3, 5]))]
    first, second, third = checks.read(seen)
    assert holds(ExactValues((3, 4)), first) and not holds(ExactValues((3, 4)), third)
    assert second == [-1.0, 2.0]


class Waits(TorchDispatchMode):
    """Counts operations that read a number from the device one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_products_are_counted(tmp_path: Path) -> None:
    """What products on codes need beside the weights, on a GPU, is in the plan: a float32 scale for each row of every matrix, and one
    for activations; formats without such products need nothing."""
    for name, rows in (("fp8-static", 2 * (192 + 2 * 64 + 192 + 2 * 320 + 192)), ("fp8-block", 0)):
        make(FORMATS[name], "llama", tmp_path / name)
        on = {
            kind: planning_context(tmp_path / name, settings=LoadConfig(device="cpu"), device=torch.device(kind))
            for kind in ("cpu", "cuda")
        }
        transient = {kind: scratch_budget(context, prepare(context)).transient for kind, context in on.items()}
        assert transient["cuda"] - transient["cpu"] == 4 * (rows + (2 * 4 if rows else 0))


@pytest.mark.parametrize("name", ["fp8-block", "fp8-static", "gptq-order", "modelopt-nvfp4"])
def test_one_look_for_a_model(name: str, tmp_path: Path) -> None:
    """Finishing a whole model reads no number by itself, and gathers those of each dtype once."""
    make(FORMATS[name], "llama", tmp_path)
    loaded = load_model(tmp_path, load=LoadConfig(device="cpu"))
    with Waits() as waits:
        finish(loaded.model, loaded.plan)
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "any", "isfinite"} & set(waits.names)
    assert 1 <= waits.names.count("cat") <= 4
