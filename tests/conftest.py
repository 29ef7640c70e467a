"""Fixtures for every test.  Helpers that are not fixtures lie in ``tests/support``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# pytest writes the assertions of test files as ifs; with this those of helpers too, so that both count under python -O.
pytest.register_assert_rewrite(*(f"tests.{folder.name}" for folder in Path(__file__).parent.iterdir() if folder.is_dir()))

from tests.support.paths import ROOT, child_env  # noqa: E402  # a helper

# Before torch or transformers are imported anywhere: no test reaches a hub, and workers do not fight for cores.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch asks the name server who 127.0.0.1 is at every connection: an answer that is lost costs a second, not the usual five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis: the same examples everywhere, so that a run can be repeated, and nothing that depends on time (a deadline,
    the check for slow examples), since a busy machine is no fault.  ``--hypothesis-profile search`` looks for new ones."""
    if not config.pluginmanager.hasplugin("hypothesispytest"):
        return  # a GPU machine may lack it, and no test there needs it
    from hypothesis import HealthCheck, settings

    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("suite", patient, derandomize=True)
    settings.register_profile("search", patient, max_examples=2000)
    settings.load_profile(config.getoption("--hypothesis-profile") or "suite")


def fetched(name: str) -> Path:
    """A checkpoint of ``tools/fetch_models.py``.  Where it cannot be had the test fails: a skip would hide it."""
    cache = Path(os.environ.get("RTP_LLM_TEST_MODELS", ROOT / ".cache" / "models")).absolute()
    command = [sys.executable, str(ROOT / "tools" / "fetch_models.py"), name, "--cache", str(cache)]
    done = subprocess.run(command, env=child_env(), capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"{name} cannot be had: {done.stderr.strip()}", pytrace=False)
    return cache / name


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 272 bfloat16 tensors in three safetensors shards, tied embeddings, 9 heads, 3 KV heads."""
    return fetched("smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2: a BERT encoder in one float32 safetensors file, with its pooling configuration."""
    return fetched("minilm")
