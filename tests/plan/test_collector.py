"""Planning is not slowed down by Python's collector, and leaves it as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rtp_llm import LoadConfig, build_plan
from rtp_llm.checkpoint import read, read_catalog
from rtp_llm.collector import collector_paused
from rtp_llm.loader.prepare import prepared
from tests.support.tiny import save_tiny_llama


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("before", [gc.enable, gc.disable])
def test_the_collector_is_left_as_it_was(before: Callable[[], None]) -> None:
    """Off within, and then as it was, with an error as well and one within another."""
    before()
    running = gc.isenabled()
    with pytest.raises(ValueError, match="within"), collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ValueError("within")
    assert gc.isenabled() is running


def test_a_catalogue_is_not_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are headers, whoever reads them."""
    seen: list[bool] = []
    header = read.read_header
    monkeypatch.setattr(read, "read_header", lambda *args: (seen.append(gc.isenabled()), header(*args))[1])
    read_catalog(save_tiny_llama(tmp_path / "llama")).raise_for_problems()
    assert seen == [False] and gc.isenabled()


def test_planning_is_not_collected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector is off from the first header to the plan, and on again afterwards."""
    seen: list[bool] = []
    for name in ("read_catalog", "join"):
        step = getattr(prepared, name)
        monkeypatch.setattr(prepared, name, lambda *args, step=step, **kwargs: (seen.append(gc.isenabled()), step(*args, **kwargs))[1])
    build_plan(save_tiny_llama(tmp_path / "llama"), load=LoadConfig(device="cpu"))
    assert seen == [False, False] and gc.isenabled()
