"""A load that comes to harm says what happened, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.loader.faults import HARMS, assert_nothing_left, in_a_process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return in_a_process(tmp_path_factory.mktemp("faults") / "llama", "cpu")


@pytest.mark.parametrize(("harm", "error", "text"), HARMS)
def test_harm_on_the_way(found: dict[str, dict[str, Any]], harm: str, error: str, text: str) -> None:
    """Ctrl-C, a read that fails, no memory for a reader or for one of the last parameters, a file that is cut."""
    assert_nothing_left(found[harm], error, text)


def test_the_next_load_is_whole(found: dict[str, dict[str, Any]]) -> None:
    """After all of that the same process loads the same checkpoint, bit for bit."""
    assert found["afterwards"]["verified"] > 100
