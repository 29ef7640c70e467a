"""Latent and delta attention, sparse attention and experts on one GPU give what they give on the CPU.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from tests.models.latents import VARIANTS, save
from tests.models.reference import closeness, distance, token_ids

pytestmark = pytest.mark.gpu

STEPS = [15, 1, 8]
#: In bfloat16 the last bits decide which tokens an indexer chooses, and they are not those of the CPU.
DENSE = [variant for variant in VARIANTS if not variant.startswith("v32")]


def both(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits on the CPU; on the GPU in one pass; and there in steps with a cache."""
    ids = token_ids()
    # By torch's kernels on both: others differ in the last bits, which send some tokens to other experts.
    host, device = (load_model(folder, load=LoadConfig(device=name, kernels="torch")).model for name in ("cpu", "cuda"))
    with torch.inference_mode():
        cache = device.new_cache(len(ids), ids.shape[1])
        stepped = torch.cat([device(part, cache) for part in ids.cuda().split(STEPS, dim=1)], dim=1)
        return host(ids), device(ids.cuda()).cpu(), stepped.cpu()


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32(variant: str, tmp_path: Path) -> None:
    """Logits differ by less than 1e-4."""
    save(variant, tmp_path)
    host, whole, stepped = both(tmp_path)
    assert distance(whole, host) < 1e-4
    assert distance(stepped, host) < 1e-4


@pytest.mark.parametrize("variant", DENSE)
def test_bfloat16(variant: str, tmp_path: Path) -> None:
    """Logits point the same way: cosine above 0.999."""
    save(variant, tmp_path, dtype=torch.bfloat16)
    host, whole, stepped = both(tmp_path)
    assert closeness(whole, host) > 0.999
    assert closeness(stepped, host) > 0.999
