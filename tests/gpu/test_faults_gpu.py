"""Harm on the way to a GPU: the same errors as on the CPU, and neither device memory nor page-locked memory is kept.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import CheckpointError
from rtp_llm.transport.scratch import pool
from rtp_llm.transport.scratch.staging import Pinned, Staging
from tests.loader.faults import HARMS, LOCKED, Noted, assert_nothing_left, in_a_process

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return in_a_process(tmp_path_factory.mktemp("faults") / "llama", "cuda")


@pytest.mark.parametrize(("harm", "error", "text"), HARMS)
def test_harm_on_the_way(found: dict[str, dict[str, Any]], harm: str, error: str, text: str) -> None:
    """Ctrl-C, a read that fails, no host memory for a reader, no device memory for one of the last parameters, a file that is
    cut."""
    assert_nothing_left(found[harm], error, text)


def test_the_next_load_is_whole(found: dict[str, dict[str, Any]]) -> None:
    """After all of that the same process loads the same checkpoint, bit for bit, and keeps no locked memory either."""
    assert found["afterwards"]["verified"] > 100 and found["afterwards"]["locked"] == 0


def test_buffers_of_a_load_that_cannot_be_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made while others plan: when that fails they are given back."""
    monkeypatch.setattr(pool, "Pinned", Noted)
    with pytest.raises(CheckpointError):
        load_model(tmp_path, load=LoadConfig(device="cuda"))
    assert LOCKED == []


def test_buffers_are_locked_and_whole() -> None:
    """Both buffers of a thread lie in locked memory, which a copy without waiting takes as such, until it is given back."""
    pinned = Pinned(2, 1 << 20)
    for number in range(2):
        pinned.touch(number)
    pinned.wait()
    with Staging(torch.device("cuda"), 1 << 20, pinned.parts[1]) as own:
        slots = [own.take(1 << 20), own.take(1 << 20)]
        assert slots[0].tensor.data_ptr() != slots[1].tensor.data_ptr()
        assert all(slot.tensor.numel() == 1 << 20 and slot.tensor.is_pinned() for slot in slots)
        content = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
        slots[0].bytes[:] = content.numpy().data
        copied = slots[0].tensor.to("cuda", non_blocking=True)
        own.give(slots[0])
        torch.cuda.synchronize()
        assert torch.equal(copied.cpu(), content)
    pinned.release()
    assert not pinned.parts[1].is_pinned()
