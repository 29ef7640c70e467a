"""Checkpoints whose headers are alike are told apart by their content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rtp_llm.checkpoint import read_catalog
from rtp_llm.loader.prepare.fingerprint import content_lines

#: A tensor of several pages.
LENGTH = 1 << 16


def lines(folder: Path, tensor: torch.Tensor, **config: object) -> list[str]:
    folder.mkdir()
    save_file({"a": tensor}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return list(content_lines(read_catalog(folder), config))


@pytest.mark.parametrize(("at", "told"), [(LENGTH // 2, True), (LENGTH // 2 - 2000, True), (0, False), (LENGTH - 1, False)])
def test_the_middle_of_a_tensor_is_looked_at(tmp_path: Path, at: int, told: bool) -> None:
    """One byte in the middle tells two checkpoints apart. Ends may be padding, and embeddings begin with tokens that nobody trains:
    they are not looked at."""
    tensor = torch.zeros(LENGTH, dtype=torch.uint8)
    base = lines(tmp_path / "base", tensor)
    tensor[at] = 1
    assert (lines(tmp_path / "tuned", tensor) != base) is told


def test_tensors_smaller_than_a_sample(tmp_path: Path) -> None:
    """All of such a tensor is looked at."""
    tensor = torch.zeros(9, dtype=torch.uint8)
    found = {tuple(lines(tmp_path / "base", tensor))}
    for at in (0, 8):
        found.add(tuple(lines(tmp_path / str(at), tensor.clone().index_fill_(0, torch.tensor([at]), 1))))
    assert len(found) == 3


def test_configuration_counts(tmp_path: Path) -> None:
    """The same weights under another ``config.json`` are another model."""
    tensor = torch.zeros(9)
    assert lines(tmp_path / "a", tensor, rope_theta=1e4)[1:] == lines(tmp_path / "b", tensor, rope_theta=1e6)[1:]
    assert lines(tmp_path / "c", tensor, rope_theta=1e4)[0] != lines(tmp_path / "d", tensor, rope_theta=1e6)[0]
