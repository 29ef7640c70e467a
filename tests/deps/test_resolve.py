"""Each lock is what its input resolves to. These tests ask the package index, as the update command does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from arch_config.table import ROOT, load_table
from deps.locks import Entry, Lock, parse_lock
from deps.policy import check_all, read_files
from deps.resolve import resolve
from deps.update import main as update

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
        "hash exchanged": tuple(
            Entry(e.name, e.extras, e.version, e.url, "0" * 64, e.file_name) if e.name == "click" else e for e in lock.entries
        ),
    }
    resolved = resolve(TABLE.platforms["cpu"], BASE, lock, upgrade=False)
    for edit, entries in edits.items():
        assert tuple(resolved) != tuple(sorted(entries, key=lambda e: e.name)), edit


def test_update_mends_a_torch_bump_in_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch version in the table alone: the policy refuses the locks; the update command makes them right."""
    for folder in ("arch_config", "deps", "bazel/pip", "bazel/compat"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for path in tmp_path.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    table = tmp_path / "arch_config" / "platforms.bzl"
    table.write_text(table.read_text().replace('"version": "2.13.0",', '"version": "2.11.0",'))
    before = check_all(read_files(tmp_path))
    for name in ("cuda13", "cuda13_arm"):
        assert any(problem.startswith(f"{name}: torch 2.13.0 from the index, the table has 2.11.0") for problem in before)
    monkeypatch.setenv("BUILD_WORKSPACE_DIRECTORY", str(tmp_path))
    assert update(["--platform", "cuda13", "--platform", "cuda13_arm"]) == 0
    assert check_all(read_files(tmp_path)) == []
    assert "torch==2.11.0 \\" in (tmp_path / "deps" / "requirements_lock_cuda13.txt").read_text()
