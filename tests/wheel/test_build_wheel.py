"""The packer: the same bytes for the same input, in any order, at any time; what a wheel cannot carry is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from arch_config.table import ROOT
from bazel.wheel.build_wheel import main, zip_time


def pack(folder: Path, name: str, files: list[str], licences: tuple[str, ...] = ("LICENSE", "NOTICE")) -> Path:
    out = folder / name
    command = ["--out", str(out), "--pyproject", str(ROOT / "pyproject.toml"), "--readme", str(ROOT / "README.md")]
    command += ["--version", "1.0+cpu", "--tag", "cp311-none-any", "--python", "3.11", "--requires", "rich>=13", "--requires", "click"]
    for file in files:
        command += ["--file", file]
    for licence in licences:
        command += ["--license", f"{licence}={ROOT / licence}"]
    assert main(command) == 0
    return out


def test_bytes_do_not_depend_on_order_or_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files given in another order, with other times and modes, make the same wheel."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files = [f"rtp_llm/{name}={tmp_path / name}" for name in ("a", "b")]
    first = pack(tmp_path, "first.whl", files).read_bytes()
    (tmp_path / "a").touch()
    (tmp_path / "b").chmod(0o755)
    assert pack(tmp_path, "second.whl", files[::-1]).read_bytes() == first


def test_source_date_epoch_is_every_entry_s_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SOURCE_DATE_EPOCH, in UTC, to the two seconds a zip knows; without it, and before 1980, the first of 1980."""
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000001")
    with zipfile.ZipFile(pack(tmp_path, "x.whl", [])) as archive:
        assert {entry.date_time for entry in archive.infolist()} == {(2023, 11, 14, 22, 13, 20)}
    assert zip_time(None) == zip_time("0") == (1980, 1, 1, 0, 0, 0)


def test_record_comes_last(tmp_path: Path) -> None:
    """PEP 427 recommends the .dist-info at the end; RECORD is the last entry."""
    with zipfile.ZipFile(pack(tmp_path, "x.whl", [])) as archive:
        assert archive.namelist()[-1] == "rtp_llm-1.0+cpu.dist-info/RECORD"


@pytest.mark.parametrize("destination", ["/etc/passwd", "../x", 'rtp_llm/a"b', "rtp_llm/a,b"])
def test_names_that_a_wheel_cannot_carry_are_refused(tmp_path: Path, destination: str) -> None:
    """Absolute and climbing paths, and characters that RECORD would have to quote."""
    (tmp_path / "a").write_text("")
    with pytest.raises(SystemExit, match="cannot carry"):
        pack(tmp_path, "x.whl", [f"{destination}={tmp_path / 'a'}"])


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    """Two sources for one destination: neither wins silently."""
    (tmp_path / "a").write_text("")
    with pytest.raises(SystemExit, match="given twice"):
        pack(tmp_path, "x.whl", [f"rtp_llm/a={tmp_path / 'a'}"] * 2)


def test_licence_files_are_pyproject_s(tmp_path: Path) -> None:
    """A licence file that pyproject.toml names and the BUILD file forgot stops the build."""
    with pytest.raises(SystemExit, match="licence files"):
        pack(tmp_path, "x.whl", [], licences=("LICENSE",))
