"""The wheel checks find what is wrong with a wheel: each fault is planted in a wheel that is otherwise right."""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from arch_config.table import ROOT, base_requirements, load_table
from bazel.wheel.build_wheel import main as build_wheel
from bazel.wheel.build_wheel import record_line
from bazel.wheel.check_wheel import check, cuda_major, needed, project_version
from deps.locks import parse_lock

TABLE = load_table()
VERSION = project_version()


def build(folder: Path, name: str = "rocm", urls: bool = True, files: dict[str, Path] | None = None, **arguments: str) -> Path:
    """A platform's wheel, packed by the real packer from a few files."""
    platform = TABLE.platforms[name]
    version = arguments.get("version", f"{VERSION}+{platform.local_version}")
    tag = arguments.get("tag", platform.wheel_tag)
    out = folder / f"rtp_llm-{version}-{tag}.whl"
    sources = {"rtp_llm/__init__.py": "", "rtp_llm/py.typed": "", "rtp_llm/cli/__init__.py": "def main():\n    return 0\n"}
    command = ["--out", str(out), "--pyproject", str(ROOT / "pyproject.toml"), "--readme", str(ROOT / "README.md")]
    command += ["--version", version, "--tag", tag, "--python", arguments.get("python", platform.python)]
    for destination, text in sources.items():
        source = folder / destination.replace("/", "_")
        source.write_text(text)
        command += ["--file", f"{destination}={source}"]
    for destination, source in (files or {}).items():
        command += ["--file", f"{destination}={source}"]
    for licence in ("LICENSE", "NOTICE"):
        command += ["--license", f"{licence}={ROOT / licence}"]
    for line in platform.requires_dist(base_requirements(), urls):
        command += ["--requires", line]
    assert build_wheel(command) == 0
    return out


def problems_of(wheel: Path, name: str = "rocm", urls: bool = True) -> list[str]:
    lock = parse_lock((ROOT / "deps" / f"requirements_lock_{name}.txt").read_text())
    return check(wheel, TABLE.platforms[name], lock, base_requirements(), VERSION, urls)


def rewrite(wheel: Path, change: Callable[[str, bytes], bytes | None], record: bool = True) -> Path:
    """The wheel with some files changed or left out (None); with ``record``, RECORD fits what is then there."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    changed = {name: data for name, old in files.items() if (data := change(name, old)) is not None}
    own = next(name for name in files if name.endswith("/RECORD"))
    if record:
        lines = [record_line(name, data) for name, data in changed.items() if name != own]
        changed[own] = ("".join(lines) + f"{own},,\n").encode()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, data in changed.items():
            archive.writestr(name, data)
    return wheel


def metadata_line(old: str, new: str) -> Callable[[str, bytes], bytes]:
    def change(name: str, data: bytes) -> bytes:
        if not name.endswith("/METADATA"):
            return data
        text, count = re.subn(old, new, data.decode(), count=1, flags=re.MULTILINE)
        assert count == 1
        return text.encode()

    return change


def in_file(ending: str, old: bytes, new: bytes) -> Callable[[str, bytes], bytes]:
    return lambda name, data: data.replace(old, new) if name.endswith(ending) else data


def without(ending: str) -> Callable[[str, bytes], bytes | None]:
    return lambda name, data: None if name.endswith(ending) else data


@pytest.mark.parametrize("name", sorted(TABLE.platforms))
@pytest.mark.parametrize("urls", [True, False])
def test_a_right_wheel_has_no_problem(tmp_path: Path, name: str, urls: bool) -> None:
    """What the packer makes from the table's values is right for every platform."""
    assert problems_of(build(tmp_path, name, urls), name, urls) == []


FAULTS: dict[str, tuple[Callable[[str, bytes], bytes | None], str]] = {
    "torch of another CUDA": (
        metadata_line(r"^Requires-Dist: torch @ .*$", "Requires-Dist: torch==2.13.0+cu128"),
        r"Requires-Dist has torch 2\.13\.0\+cu128, the lock does not",
    ),
    "torch without its URL": (
        metadata_line(r"^Requires-Dist: torch @ .*$", "Requires-Dist: torch>=2.9"),
        r"Requires-Dist lacks torch@|Requires-Dist lacks torch @",
    ),
    "torch with another hash": (
        metadata_line(r"sha256=43471c9e", "sha256=00001c9e"),
        r"Requires-Dist has torch 2\.9\.1\+rocm6\.4 @ \S+ sha256 00001c9e\S+, the lock does not",
    ),
    "a requirement too many": (
        metadata_line(r"^Requires-Dist: rich", "Requires-Dist: vllm\nRequires-Dist: rich"),
        r"Requires-Dist has vllm, the table does not",
    ),
    "flashinfer where there is none": (
        metadata_line(r"^Requires-Dist: rich", "Requires-Dist: flashinfer-python==0.6.6\nRequires-Dist: rich"),
        r"Requires-Dist has flashinfer-python 0\.6\.6, the lock does not",
    ),
    "a requirement missing": (metadata_line(r"^Requires-Dist: rich.*\n", ""), r"Requires-Dist lacks rich"),
    "no space before the marker": (
        metadata_line(r"^(Requires-Dist: torch @ \S+)$", r"\1; python_version > '3'"),
        r"no space between URL and marker",
    ),
    "a requirement that does not parse": (
        metadata_line(r"^Requires-Dist: rich.*$", "Requires-Dist: rich >= >= 13"),
        r"METADATA: .*requires-dist",
    ),
    "no licence file": (without("licenses/NOTICE"), r"names licence file NOTICE, the wheel has none"),
    "another version inside": (metadata_line(r"^Version: .*$", "Version: 9.9+rocm6.4"), r"METADATA: Version 9\.9\+rocm6\.4"),
    "another Python inside": (metadata_line(r"^Requires-Python: .*$", "Requires-Python: >=3.8"), r"METADATA: Requires-Python >=3\.8"),
    "another tag inside": (in_file("/WHEEL", b"x86_64", b"aarch64"), r"WHEEL has tags \['cp312-none-manylinux_2_28_aarch64'\]"),
    "no py.typed": (without("py.typed"), r"rtp_llm/py\.typed is missing"),
    "no console script": (without("entry_points.txt"), r"console scripts \[\], expected rtp-llm"),
    "console script to nowhere": (in_file("entry_points.txt", b"cli:main", b"cli:start"), r"rtp_llm\.cli does not define start"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(tmp_path: Path, fault: str) -> None:
    """The check names the file or the line, what it found and what was expected."""
    change, expected = FAULTS[fault]
    problems = problems_of(rewrite(build(tmp_path), change))
    assert any(re.search(expected, problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (in_file("cli/__init__.py", b"return 0", b"return 1"), r"RECORD: rtp_llm/cli/__init__\.py: \['sha256="),
        (without("py.typed"), r"RECORD: rtp_llm/py\.typed is not in the wheel"),
        (in_file("/RECORD", b"rtp_llm/py.typed,", b"rtp_llm/py.type,"), r"RECORD: rtp_llm/py\.typed: None"),
    ],
)
def test_record_is_held_against_the_files(tmp_path: Path, change: Callable[[str, bytes], bytes | None], expected: str) -> None:
    """A changed, a missing and an unlisted file are found by RECORD alone."""
    problems = problems_of(rewrite(build(tmp_path), change, record=False))
    assert any(re.search(expected, problem) for problem in problems), problems


def test_files_outside_the_package_are_found(tmp_path: Path) -> None:
    """A wheel installs rtp_llm and nothing else at the top of site-packages."""
    stray = tmp_path / "stray.py"
    stray.write_text("")
    assert any("files outside the package: ['tests']" in p for p in problems_of(build(tmp_path, files={"tests/stray.py": stray})))


def test_name_and_version_of_another_platform_are_found(tmp_path: Path) -> None:
    """A wheel of the right contents under another platform's local version is refused."""
    wheel = build(tmp_path, version=f"{VERSION}+cu130")
    assert any("file name" in p and f"expected rtp_llm-{VERSION}+rocm6.4" in p for p in problems_of(wheel))


def library(folder: Path, name: str, *needs: str) -> Path:
    """A real shared library that needs others of these sonames."""
    made = []
    for soname in needs:
        other = folder / soname
        run = ["gcc", "-shared", "-nostdlib", "-x", "c", "/dev/null", "-o", str(other), f"-Wl,-soname,{soname}"]
        subprocess.run(run, check=True)
        made.append(str(other))
    out = folder / name
    link = ["gcc", "-shared", "-nostdlib", "-Wl,--no-as-needed", "-x", "c", "/dev/null", "-x", "none", *made, "-o", str(out)]
    subprocess.run(link, check=True)
    return out


@pytest.mark.parametrize(
    ("name", "needs", "expected"),
    [
        ("cuda12_9", ("libcudart.so.12", "libtorch_cuda.so", "libc10.so", "libc.so.6"), None),
        ("cuda13", ("libcudart.so.13", "libcublasLt.so.13", "libcufft.so.12"), None),
        ("cuda12_9", ("libcudart.so.13",), r"rtp_llm/_kernels\.so needs libcudart\.so\.13: CUDA 13, the platform has 12\.9"),
        ("cuda12_9", ("libcudart.so.12", "libcufft.so.12"), r"needs libcufft\.so\.12: CUDA 13, the platform has 12\.9"),
        ("cpu", ("libcudart.so.13",), r"needs libcudart\.so\.13, which neither the wheel nor its requirements have"),
        ("rocm", ("libfoo.so.1",), r"needs libfoo\.so\.1, which neither the wheel nor its requirements have"),
    ],
)
def test_needed_libraries_resolve_with_one_cuda_major(tmp_path: Path, name: str, needs: tuple[str, ...], expected: str | None) -> None:
    """DT_NEEDED of a library planted in the wheel: right for the platform, or named with what is wrong."""
    planted = library(tmp_path, "_kernels.so", *needs)
    assert sorted(needed(planted.read_bytes())) == sorted(needs)
    problems = problems_of(build(tmp_path, name, files={"rtp_llm/_kernels.so": planted}), name)
    if expected is None:
        assert problems == []
    else:
        assert any(re.search(expected, problem) for problem in problems), problems


def test_library_inside_the_wheel_resolves(tmp_path: Path) -> None:
    """A library may need another one of the same wheel."""
    planted = library(tmp_path, "_kernels.so", "libown.so.1")
    files = {"rtp_llm/_kernels.so": planted, "rtp_llm/libown.so.1": tmp_path / "libown.so.1"}
    assert problems_of(build(tmp_path, files=files)) == []


def test_bundled_cuda_library_is_refused(tmp_path: Path) -> None:
    """torch's requirements bring CUDA's libraries; a second copy in our wheel could be of another version."""
    planted = library(tmp_path, "libcudart.so.13")
    problems = problems_of(build(tmp_path, "cuda13", files={"rtp_llm/libcudart.so.13": planted}), "cuda13")
    assert any("a bundled CUDA library" in problem for problem in problems)


def test_cuda_major_of_a_soname() -> None:
    """Most sonames carry the CUDA major; cuFFT and cuSOLVER carry their own, one behind; cuDNN's says nothing."""
    sonames = ("libcudart.so.12", "libcublas.so.13", "libcufft.so.11", "libcusolver.so.12", "libcudnn.so.9", "libcuda.so.1", "libc.so.6")
    assert [cuda_major(soname) for soname in sonames] == ["12", "13", "12", "13", None, None, None]
