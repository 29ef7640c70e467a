"""Documentation that is generated is what the code says."""

from __future__ import annotations

from rtp_llm.config.load import StackedMode
from rtp_llm.transport.fastsafetensors.config import CHUNK_BYTES
from rtp_llm.transport.fastsafetensors.docs import markdown
from rtp_llm.transport.fastsafetensors.probe import _FILTERS, _SPLITS
from tests.support.paths import ROOT


def test_server_arguments() -> None:
    """``docs/backend/server_arguments.md`` is generated, and names what the probe looks for, the modes, and the chunk size."""
    text = markdown()
    assert (ROOT / "docs" / "backend" / "server_arguments.md").read_text() == text
    for name in (*_FILTERS, *_SPLITS, *(mode.value for mode in StackedMode), str(CHUNK_BYTES)):
        assert name in text


def test_breaking_changes_have_their_form() -> None:
    """Every entry says when, whom it concerns, what to do, and how to go back."""
    _, *entries = (ROOT / "docs" / "release" / "breaking-changes.md").read_text().split("\n## ")
    assert entries
    for entry in entries:
        positions = [entry.find(f"- **{part}**: ") for part in ("Introduced", "Impact", "Migration", "Rollback")]
        assert -1 not in positions and positions == sorted(positions), entry
