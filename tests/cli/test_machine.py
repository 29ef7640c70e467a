"""The doctor's facts about the machine are true."""

from __future__ import annotations

import os

from rtp_llm.cli import machine


def test_cpus_and_memory() -> None:
    """Counts are those the operating system gives this process."""
    assert 1 <= machine.cpu_count() <= (os.cpu_count() or 1)
    memory = machine.memory()
    assert memory["total"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < (memory["available"] or 0) <= memory["total"]
