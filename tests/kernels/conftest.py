"""What flashinfer writes when it is imported belongs to the tests, not to whoever runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """flashinfer makes its directory below the home directory, which a sandbox may not let it, unless this variable names another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
        yield
