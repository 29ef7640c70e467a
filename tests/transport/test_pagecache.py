"""What is known of files before they are read is true."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rtp_llm.transport import pagecache


def test_page_cache_is_measured_without_filling_it(tmp_path: Path) -> None:
    """A file just written is cached; once its pages are dropped it is not, and asking does not bring it back."""
    path = tmp_path / "file"
    nbytes = (8 << 20) + 123
    with path.open("wb") as file:
        file.write(os.urandom(nbytes))
        file.flush()
        os.fsync(file.fileno())
        assert pagecache.cached_bytes(path) == nbytes
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if pagecache.file_system(tmp_path).kind == "tmpfs":  # type: ignore[union-attr]
        return  # its pages are the file: they cannot be dropped
    assert pagecache.cached_bytes(path) < nbytes // 2  # type: ignore[operator]
    assert pagecache.cached_bytes(path) < nbytes // 2  # type: ignore[operator]


def test_page_cache_of_an_empty_file(tmp_path: Path) -> None:
    """Nothing to map is nothing cached, not an error."""
    (tmp_path / "empty").touch()
    assert pagecache.cached_bytes(tmp_path / "empty") == 0


def test_windows_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file larger than one look at it is counted whole."""
    path = tmp_path / "file"
    path.write_bytes(b"x" * (5 << 20))
    monkeypatch.setattr(pagecache, "_WINDOW", 1 << 20)
    assert pagecache.cached_bytes(path) == 5 << 20


def test_an_estimate_from_samples(tmp_path: Path) -> None:
    """Small files are counted, large ones judged by samples: all, none and the first half of a 64 MiB file."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(os.urandom(3 << 20))
        file.flush()
        os.fsync(file.fileno())
        assert pagecache.estimated_cached_bytes(path) == 3 << 20
        file.write(os.urandom(61 << 20))
        file.flush()
        os.fsync(file.fileno())
        assert pagecache.estimated_cached_bytes(path) == 64 << 20
        if pagecache.file_system(tmp_path).kind == "tmpfs":  # type: ignore[union-attr]
            return
        os.posix_fadvise(file.fileno(), 32 << 20, 0, os.POSIX_FADV_DONTNEED)
        half = pagecache.estimated_cached_bytes(path)
        assert half is not None and 24 << 20 <= half <= 40 << 20
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert pagecache.estimated_cached_bytes(path) == 0


def test_file_systems_by_longest_mount_point(tmp_path: Path) -> None:
    """``/proc`` is proc even though ``/`` is a mount point of another kind, and links are followed."""
    found = pagecache.file_system(Path("/proc/self"))
    assert found is not None and (found.mount_point, found.kind, found.network) == ("/proc", "proc", False)
    (tmp_path / "link").symlink_to("/proc")
    assert pagecache.file_system(tmp_path / "link") == found


@pytest.mark.parametrize(("kind", "network"), [("nfs4", True), ("fuse.sshfs", True), ("ext4", False), ("overlay", False)])
def test_network_file_systems_are_known(kind: str, network: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mount points with white space are octal in mountinfo, and the kind decides whether it is a network's."""
    text = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:4 / /a\\040b rw shared:1 - {kind} server:/x rw\n"
    monkeypatch.setattr(pagecache, "_read", lambda path: text)
    found = pagecache.file_system(Path("/a b/c"))
    assert found == pagecache.FileSystem("/a b", kind, network)
    assert pagecache.file_system(Path("/a bc")) == pagecache.FileSystem("/", "ext4", False)
