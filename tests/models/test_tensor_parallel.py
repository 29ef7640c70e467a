"""Two and three real ranks over gloo compute what one computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rtp_llm import ParallelConfig, build_plan, load_model
from rtp_llm.errors import ParallelError, PlanError
from tests.models import decoders, encoders
from tests.models.rank_worker import both
from tests.models.reference import SMALL, VOCAB, distance, make, token_ids
from tests.support.ranks import run_ranks

STEPS = [15, 1, 8]

#: Six heads, three KV heads (two or six after a colon, where three cannot be shared out).  Multi-query shares its KV head
#: between all ranks; biases show one that is added once for each rank; tied embeddings share a padded table.
CAUSAL = {
    2: [
        "llama-multi-query",
        "llama-multi-head",
        "llama-biases:2",
        "llama-tied:6",
        "mistral-window:2",
        "phi3:2",
        "qwen2:2",
        "qwen3-tied-biases:2",
    ],
    3: [
        "llama",
        "llama-multi-query",
        "llama-biases",
        "llama-tied",
        "mistral-window",
        "phi3-window",
        "qwen2-late-window",
        "qwen3-tied-biases",
    ],
}
ENCODERS = ["bert", "roberta-masked-lm", "xlm-roberta"]


def checkpoint(variant: str, folder: Path) -> None:
    name, _, kv_heads = variant.partition(":")
    model_class, config = decoders.configured(name)
    if kv_heads:
        config.num_key_value_heads = int(kv_heads)
    make(model_class, config, folder)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_what_one_computes(size: int, tmp_path: Path) -> None:
    """Logits and hidden states, with a cache and without, differ by less than 1e-4 from one rank's, and are the same on
    all ranks to the last bit."""
    ids = token_ids().clamp(min=2)
    mask = torch.ones_like(ids)
    ids[1, 17:], mask[1, 17:] = 1, 0
    causal_folders = {str(tmp_path / variant.replace(":", "-")): variant for variant in CAUSAL[size]}
    for folder, variant in causal_folders.items():
        checkpoint(variant, Path(folder))
    encoder_folders = [str(tmp_path / variant) for variant in ENCODERS]
    for folder, variant in zip(encoder_folders, ENCODERS, strict=True):
        make(*encoders.configured(variant), Path(folder))

    results = run_ranks(size, both, list(causal_folders), encoder_folders, ids, STEPS, mask, timeout=120)

    causal, encoded = results[0].value
    for folder, variant in causal_folders.items():
        with torch.inference_mode():
            alone = load_model(folder, device="cpu").model(ids)
        assert causal[folder][0].shape == (2, 24, VOCAB)
        for logits in causal[folder]:
            assert distance(logits, alone) < 1e-4, variant
        assert all(torch.equal(causal[folder][0], other.value[0][folder][0]) for other in results[1:]), variant
    for folder in encoder_folders:
        with torch.inference_mode():
            alone = load_model(folder, device="cpu").model(ids, mask)
        assert distance(encoded[folder][mask.bool()], alone[mask.bool()]) < 1e-4, folder


@pytest.mark.parametrize(("size", "padding"), [(1, [0]), (2, [0, 27]), (3, [0, 27, 64])])
def test_the_vocabulary_is_padded_where_it_ends(size: int, padding: list[int], tmp_path: Path) -> None:
    """101 rows over ranks of 64: the second holds 37 and 27 of padding, the third nothing but padding; one rank none.
    All plan the same model."""
    make(*decoders.configured("llama-multi-query"), tmp_path)
    plans = [build_plan(tmp_path, ParallelConfig(tp_size=size, tp_rank=rank)) for rank in range(size)]
    for plan, rows in zip(plans, padding, strict=True):
        assert not plan.problems
        filled = {(name, fill.local_box[0][1] - fill.local_box[0][0]) for name, fill in plan.fills}
        assert filled == ({("embed.weight", rows), ("lm_head.weight", rows)} if rows else set())
    assert len({plan.digest for plan in plans}) == 1


@pytest.mark.parametrize(("size", "named"), [(2, "3 key/value heads"), (4, "6 attention heads"), (5, "96 elements of intermediate_size")])
def test_sizes_that_do_not_divide_are_refused(size: int, named: str, tmp_path: Path) -> None:
    """At plan time, with what cannot be divided and the numbers of ranks that work."""
    make(*decoders.configured("llama"), tmp_path)
    with pytest.raises(PlanError, match=rf"{named} cannot be divided over {size}") as caught:
        build_plan(tmp_path, ParallelConfig(tp_size=size))
    assert "one of [1, 3, 6]" in str(caught.value)


def test_a_rank_alone_loads_but_does_not_run(tmp_path: Path) -> None:
    """A rank's weights can be loaded without the others; its forward pass says what it lacks."""
    make(*decoders.configured("llama-multi-query"), tmp_path)
    loaded = load_model(tmp_path, device="cpu", parallel=ParallelConfig(tp_size=2, tp_rank=1))
    assert loaded.plan.bytes_resident < build_plan(tmp_path).bytes_resident * 0.7
    with pytest.raises(ParallelError, match="NO_PROCESS_GROUP"):
        loaded.model(torch.tensor([[1, 2]]))


def test_small_sizes_are_what_the_tests_rest_on() -> None:
    """The vocabulary leaves the third of three ranks empty, and the sizes divide by two and three."""
    assert 64 < VOCAB <= 128
    assert SMALL["num_attention_heads"] % 6 == SMALL["intermediate_size"] % 6 == 0
