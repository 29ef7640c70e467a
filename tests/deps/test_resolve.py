"""Each lock is what its input resolves to. These tests ask the package index, as the update command does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from arch_config.table import ROOT, load_table
from deps.locks import Entry, Lock, parse_lock
from deps.resolve import resolve

TABLE = load_table()
BASE = (ROOT / "deps" / "requirements.in").read_text()


@pytest.fixture(autouse=True, scope="module")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own: nothing that an earlier run left answers for the index, and Bazel's sandbox lets it write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV_CACHE_DIR", str(tmp_path_factory.mktemp("uv")))
        yield


def lock_of(name: str) -> Lock:
    return parse_lock((ROOT / "deps" / f"requirements_lock_{name}.txt").read_text())


@pytest.mark.parametrize("name", sorted(TABLE.platforms))
def test_lock_is_what_its_input_resolves_to(name: str) -> None:
    """Names, extras, versions, files and hashes: resolving anew, from the versions the lock has, gives the lock."""
    lock = lock_of(name)
    assert resolve(TABLE.platforms[name], BASE, lock, upgrade=False) == list(lock.entries)


def test_lock_edited_by_hand_differs_from_what_resolves() -> None:
    """A package taken out, one put in, a hash exchanged: the resolver gives back what was there."""
    lock = lock_of("cpu")
    stranger = Entry("six", (), "1.17.0", None, "0" * 64, "six-1.17.0-py2.py3-none-any.whl")
    edits = {
        "taken out": tuple(e for e in lock.entries if e.name != "markupsafe"),
        "put in": (*lock.entries, stranger),
        "hash exchanged": tuple(Entry(e.name, e.extras, e.version, e.url, "0" * 64, e.file_name) if e.name == "click" else e for e in lock.entries),
    }
    resolved = resolve(TABLE.platforms["cpu"], BASE, lock, upgrade=False)
    for edit, entries in edits.items():
        assert tuple(resolved) != tuple(sorted(entries, key=lambda e: e.name)), edit
