"""A small made-up checkpoint for every test here."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp_llm.bench.synthetic import llama, write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 10 MB in four shards: 8 heads, 4 KV heads, untied, bfloat16."""
    directory = tmp_path_factory.mktemp("bench") / "llama"
    write_checkpoint(directory, llama(0.01))
    return directory
