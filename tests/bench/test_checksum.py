"""The checksum: equal for equal bits however they are laid out, and different for any other bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, ParallelConfig, load_model
from rtp_llm.bench.checksum import COLUMNS, BitsSum, Sums, checksum, differing, of_model, of_tensors
from tests.support.tiny import save_tiny_llama

CPU = torch.device("cpu")


def raw(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by safetensors' own reader."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def both(directory: Path, load: LoadConfig, parallel: ParallelConfig) -> tuple[Sums, Sums]:
    """The checksum of our model, and that of safetensors' tensors seen through the same plan."""
    loaded = load_model(directory, load=load, parallel=parallel)
    tensors = raw(directory)
    return checksum(loaded.plan, of_model(loaded.model, loaded.plan)), checksum(loaded.plan, of_tensors(tensors.get, loaded.plan))


@pytest.mark.parametrize("place", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_fused_sliced_and_cast_weights_sum_to_what_the_files_hold(checkpoint: Path, place: tuple[int, int], dtype: str) -> None:
    """Fusion, tensor parallelism and casts do not show: ours equals safetensors' through the plan, over every place."""
    ours, theirs = both(checkpoint, LoadConfig(device="cpu", dtype=dtype), ParallelConfig(*place))
    assert ours.text == theirs.text and ours.places == ours.wanted == theirs.places > 0
    assert list(differing(ours.by_tensor, theirs.by_tensor)) == []


def test_tied_and_replicated_weights(tmp_path: Path) -> None:
    """A tensor that several places want (a tied head, KV heads that all ranks need) is summed at each of them."""
    directory = save_tiny_llama(tmp_path, tie_word_embeddings=True, num_attention_heads=6, num_key_value_heads=1)
    ours, theirs = both(directory, LoadConfig(device="cpu"), ParallelConfig(3, 2))
    assert ours.text == theirs.text and ours.places == ours.wanted


@pytest.mark.parametrize("bit", [0, 7, 15])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_one_flipped_bit_is_found_and_its_tensor_named(checkpoint: Path, bit: int, at: str) -> None:
    """Any single bit of any weight changes the total, and only its own tensor's sum."""
    loaded = load_model(checkpoint, load=LoadConfig(device="cpu"))
    before = checksum(loaded.plan, of_model(loaded.model, loaded.plan))
    delivery = next(d for d in loaded.plan.deliveries if d.tensor.name == "model.layers.1.self_attn.k_proj.weight")
    (target,) = delivery.targets
    content = dict(loaded.model.named_parameters())[target.param].data[tuple(slice(a, b) for a, b in target.box)]
    bits = content.view(torch.int16)
    row, column = {"first": (0, 0), "middle": (5, 17), "last": (-1, -1)}[at]
    bits[row, column] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
    after = checksum(loaded.plan, of_model(loaded.model, loaded.plan))
    assert after.text != before.text
    assert list(differing(before.by_tensor, after.by_tensor)) == [delivery.tensor.name]


def test_exchanged_tensors_are_found(checkpoint: Path) -> None:
    """Two tensors of one shape in each other's place hold the same multiset of values, and differ all the same."""
    plan = load_model(checkpoint, load=LoadConfig(device="cpu")).plan
    tensors = raw(checkpoint)
    right = checksum(plan, of_tensors(tensors.get, plan))
    one, other = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    swapped = tensors | {one: tensors[other], other: tensors[one]}
    wrong = checksum(plan, of_tensors(swapped.get, plan))
    assert wrong.text != right.text and list(differing(wrong.by_tensor, right.by_tensor)) == [one, other]


def test_absent_tensors_are_counted_not_guessed(checkpoint: Path) -> None:
    """A loader that does not give a tensor under its name, or in its shape, has fewer places compared."""
    plan = load_model(checkpoint, load=LoadConfig(device="cpu")).plan
    tensors = raw(checkpoint)
    del tensors["lm_head.weight"]
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    found = checksum(plan, of_tensors(tensors.get, plan))
    assert found.places == found.wanted - 2 and "lm_head.weight" not in found.by_tensor


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 3 * COLUMNS * 8 + 40), st.integers(0, 7), st.data())
def test_every_byte_counts_at_every_length_and_alignment(length: int, offset: int, data: st.DataObject) -> None:
    """Whole rows, a rest, less than a word, none: the sum does not depend on where the memory begins, and one changed byte
    changes it."""
    sum_of = BitsSum(CPU)
    memory = torch.randint(0, 256, (length + 8,), dtype=torch.uint8)
    content = memory[offset : offset + length]
    before = sum_of(content).item()
    assert before == sum_of(content.clone()).item()
    if length:
        changed = content.clone()
        changed[data.draw(st.integers(0, length - 1))] ^= data.draw(st.integers(1, 255))
        assert sum_of(changed).item() != before


def test_exchanged_rows_and_columns_are_found() -> None:
    """Words have factors by row and by column."""
    sum_of = BitsSum(CPU)
    table = torch.randint(-(2**62), 2**62, (4, COLUMNS), dtype=torch.int64)
    before = sum_of(table).item()
    assert sum_of(table[[1, 0, 2, 3]]).item() != before
    assert sum_of(table.roll(1, 1)).item() != before


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.float8_e4m3fn, torch.float16, torch.float32, torch.float64, torch.complex64]
)
def test_every_width_and_layout(dtype: torch.dtype) -> None:
    """All dtypes, scalars, empty tensors and tensors that are not contiguous; negative zero is not zero."""
    sum_of = BitsSum(CPU)
    content = torch.arange(24).reshape(4, 6).to(dtype)
    assert sum_of(content.t()).item() == sum_of(content.t().contiguous()).item()
    assert sum_of(content[0, 1]).item() != 0 and sum_of(content[:0]).item() == 0
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert sum_of(torch.tensor(-0.0, dtype=dtype)).item() != sum_of(torch.tensor(0.0, dtype=dtype)).item()


def test_a_damaged_file_shows(checkpoint: Path, tmp_path: Path) -> None:
    """The end-to-end case: one byte of a shard changed on disk gives another checksum, whoever loads."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    before, _ = both(tmp_path, LoadConfig(device="cpu"), ParallelConfig())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(n for n in tensors if "o_proj" in n)
    tensors[name].view(torch.int16)[3, 3] ^= 1
    save_file({n: t.clone() for n, t in tensors.items()}, shard, metadata={"format": "pt"})
    ours, theirs = both(tmp_path, LoadConfig(device="cpu"), ParallelConfig())
    assert ours.text == theirs.text != before.text
    assert list(differing(ours.by_tensor, before.by_tensor)) == [name]
