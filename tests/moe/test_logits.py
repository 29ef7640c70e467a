"""Every family with experts computes what transformers computes, from both spellings in which transformers saves it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import load_model
from tests.models.decoders import reference_steps
from tests.models.reference import closeness, distance, token_ids
from tests.moe.variants import VARIANTS, make

#: The prompt, one token, and a few at once.
STEPS = [15, 1, 8]


@pytest.mark.parametrize("published", [True, False], ids=["published", "stacked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, published: bool, tmp_path: Path) -> None:
    """float32 logits differ by less than 1e-4, without a cache and, step by step, with one."""
    reference = make(variant, tmp_path, published=published)
    loaded = load_model(tmp_path, device="cpu")
    layouts = {layout.name for layout in loaded.plan.expert_layouts().values()}
    # gpt-oss is published stacked.
    assert layouts == {"PER_EXPERT" if published and not variant.startswith("gpt_oss") else "STACKED"}
    model, ids = loaded.model, token_ids()
    with torch.inference_mode():
        assert distance(model(ids), reference(ids).logits) < 1e-4
        cache = model.new_cache(len(ids), ids.shape[1])
        stepped = torch.cat([model(part, cache) for part in ids.split(STEPS, dim=1)], dim=1)
    assert distance(stepped, reference_steps(reference, ids, STEPS)) < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_checkpoints(variant: str, tmp_path: Path) -> None:
    """A bfloat16 checkpoint stays bfloat16, but for correction biases and for routers that compute in float32; its logits
    point where transformers' point: cosine above 0.999."""
    # Loaded again, since transformers keeps the float32 parts only where it loads.
    reference = type(make(variant, tmp_path, dtype=torch.bfloat16)).from_pretrained(tmp_path, dtype=torch.bfloat16)
    model, ids = load_model(tmp_path, device="cpu").model, token_ids()
    wide = {name.split(".", 2)[2] for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert wide == ({"mlp.router.weight", "mlp.router.bias"} if variant.startswith("glm4") else set())
    with torch.inference_mode():
        assert closeness(model(ids), reference(ids).logits) > 0.999
