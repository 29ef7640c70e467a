"""Holds a built wheel against the platform table and the platform's lock. Each check returns every problem in words.

python -m bazel.wheel.check_wheel WHEEL PLATFORM [--index]        exit code 1 with all problems
"""

from __future__ import annotations

import argparse
import ast
import base64
import configparser
import csv
import email.parser
import hashlib
import io
import re
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import urldefrag

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from packaging import metadata as core_metadata
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from arch_config.table import ROOT, Platform, base_requirements, load_table
from deps.locks import Lock, parse_lock, version_in_url

DISTRIBUTION = "rtp-llm"

#: Distributions whose build depends on the platform; beside them, everything that is required by URL.
SENSITIVE = re.compile(r"torch|.*-torch|.*torch-.*|flashinfer-.*|fastsafetensors|triton.*|nvidia-.*|cuda-.*")

#: What every glibc system has (PEP 600's list for manylinux, without its X11 and GL part).
SYSTEM_LIBRARIES = re.compile(r"(lib(c|m|dl|rt|pthread|util|nsl|resolv)\.so\.\d+|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux.*\.so\.\d)")

#: Libraries that torch's wheel brings.
TORCH_LIBRARIES = re.compile(r"lib(torch|c10)\w*\.so|libshm\.so")

#: CUDA libraries, and the CUDA major of a soname where the two numbers differ; None: says nothing of the major.
CUDA_LIBRARY = re.compile(
    r"lib(?P<name>cuda|cudart|cublas|cublasLt|nvrtc|nvJitLink|cupti|cufft|cusolver|cusparse|curand|cudnn\w*|nccl|cufile|nvToolsExt)"
    r"(?:-[0-9a-f]+)?\.so\.(?P<version>\d+)[\d.]*"
)
SAME_MAJOR = {"cudart", "cublas", "cublasLt", "nvrtc", "nvJitLink", "cupti"}
OTHER_MAJOR = {("cufft", "11"): "12", ("cufft", "12"): "13", ("cusolver", "11"): "12", ("cusolver", "12"): "13"}


@dataclass(frozen=True, slots=True)
class Pin:
    """A platform-sensitive requirement, comparable between metadata, lock and table. ``sha256`` only with a URL."""

    name: str
    version: str
    url: str | None
    sha256: str | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}" + (f" @ {self.url} sha256 {self.sha256}" if self.url else "")


class Wheel:
    """A wheel's files in memory: ``names`` in order, ``info`` the .dist-info folder."""

    def __init__(self, path: Path) -> None:
        self.file_name = path.name
        with zipfile.ZipFile(path) as archive:
            self.names = archive.namelist()
            self.files = {name: archive.read(name) for name in self.names}
        folders = sorted({name.split("/")[0] for name in self.names if name.split("/")[0].endswith(".dist-info")})
        if len(folders) != 1:
            raise ValueError(f"{path.name}: expected one .dist-info folder, found {folders}")
        self.info = folders[0]

    def text(self, name: str) -> str:
        """A file of the .dist-info folder; empty where it is missing."""
        return self.files.get(f"{self.info}/{name}", b"").decode("utf-8")


def check_name(wheel: Wheel, platform: Platform, version: str) -> list[str]:
    """The file name has PEP 427's grammar and is the platform's; WHEEL's tags are those of the name."""
    try:
        name, found, _, tags = parse_wheel_filename(wheel.file_name)
    except InvalidWheelFilename as error:
        return [str(error)]
    problems = []
    expected = platform.wheel_name(DISTRIBUTION, version)
    if wheel.file_name != expected:
        problems.append(f"file name {wheel.file_name}, expected {expected}")
    if wheel.info != f"{name.replace('-', '_')}-{found}.dist-info":
        problems.append(f"folder {wheel.info}, expected that of {name} {found}")
    header = email.parser.HeaderParser().parsestr(wheel.text("WHEEL"))
    inside = sorted(header.get_all("Tag", []))
    if inside != sorted(map(str, tags)):
        problems.append(f"WHEEL has tags {inside}, the file name {sorted(map(str, tags))}")
    if header.get("Wheel-Version") != "1.0":
        problems.append(f"Wheel-Version {header.get('Wheel-Version')}, expected 1.0")
    return problems


def check_metadata(wheel: Wheel, platform: Platform, version: str) -> list[str]:
    """METADATA parses, strictly, and names the distribution, the version and the platform's Python."""
    text = wheel.text("METADATA")
    # Without the space, the semicolon and the marker are part of the URL.
    lines = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("Requires-Dist:")]
    problems = [f"METADATA: no space between URL and marker: {line}" for line in lines if re.search(r"://\S*;", line)]
    try:
        found = core_metadata.Metadata.from_email(text.encode(), validate=True)
    except core_metadata.ExceptionGroup as error:
        return problems + [f"METADATA: {inner}" for inner in error.exceptions]
    expected = {
        "Name": (found.name, DISTRIBUTION),
        "Version": (str(found.version), f"{version}+{platform.local_version}"),
        "Requires-Python": (str(found.requires_python), f"=={platform.python}.*"),
        "License-Expression": (found.license_expression, "Apache-2.0"),
    }
    problems += [f"METADATA: {field} {has}, expected {wanted}" for field, (has, wanted) in expected.items() if has != wanted]
    for license_file in found.license_files or []:
        if f"{wheel.info}/licenses/{license_file}" not in wheel.files:
            problems.append(f"METADATA names licence file {license_file}, the wheel has none")
    if not found.license_files:
        problems.append("METADATA names no licence file")
    return problems


def requirements(wheel: Wheel) -> list[Requirement]:
    """Requires-Dist, in order, less the lines that do not parse: ``check_metadata`` reports these."""
    header = email.parser.HeaderParser().parsestr(wheel.text("METADATA"))
    found = []
    for line in header.get_all("Requires-Dist", []):
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            continue
    return found


def _pin(requirement: Requirement) -> Pin:
    name = canonicalize_name(requirement.name)
    if requirement.url:
        url, fragment = urldefrag(requirement.url)
        return Pin(name, version_in_url(url), url, fragment.removeprefix("sha256=") or None)
    return Pin(name, str(requirement.specifier).removeprefix("=="), None, None)


def _sensitive(requirement: Requirement) -> bool:
    return bool(requirement.url or SENSITIVE.fullmatch(canonicalize_name(requirement.name)))


def check_requirements(wheel: Wheel, platform: Platform, lock: Lock, base: list[str], urls: bool) -> list[str]:
    """Requires-Dist is, as a set, the table's; its platform-sensitive part is, as a set, what the lock has of it."""
    found = requirements(wheel)
    problems = []
    expected = {str(Requirement(line)) for line in platform.requires_dist(base, urls)}
    problems += [f"Requires-Dist has {line}, the table does not" for line in sorted({str(r) for r in found} - expected)]
    problems += [f"Requires-Dist lacks {line}" for line in sorted(expected - {str(r) for r in found})]
    if len(found) != len(set(map(str, found))):
        problems.append("Requires-Dist names a requirement twice")
    have = {_pin(r) for r in found if _sensitive(r)}
    names = {pin.name for pin in have} | {Requirement(line).name for line in platform.pinned(urls)}
    locked = {
        Pin(e.name, e.version, e.url if urls else None, e.sha256 if urls and e.url else None) for e in lock.entries if e.name in names
    }
    problems += [f"the lock has {pin}, Requires-Dist does not" for pin in sorted(locked - have, key=str)]
    problems += [f"Requires-Dist has {pin}, the lock does not" for pin in sorted(have - locked, key=str)]
    return problems


def check_record(wheel: Wheel) -> list[str]:
    """RECORD lists every file once, with its sha256 and size, and itself without."""
    rows = list(csv.reader(io.StringIO(wheel.text("RECORD"))))
    problems = [f"RECORD: not path, hash, size: {row}" for row in rows if len(row) != 3]
    listed = {row[0]: row[1:] for row in rows if len(row) == 3}
    if len(listed) != len(rows) or len(set(wheel.names)) != len(wheel.names):
        problems.append("a file is there twice")
    own = f"{wheel.info}/RECORD"
    for name, data in wheel.files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        expected = ["", ""] if name == own else [f"sha256={digest}", str(len(data))]
        if listed.get(name) != expected:
            problems.append(f"RECORD: {name}: {listed.get(name)}, expected {expected}")
    return problems + [f"RECORD: {name} is not in the wheel" for name in sorted(set(listed) - set(wheel.files))]


def check_contents(wheel: Wheel) -> list[str]:
    """The package, py.typed and the console script are there, and the script's function is defined where it points."""
    problems = [f"{name} is missing" for name in ("rtp_llm/__init__.py", "rtp_llm/py.typed") if name not in wheel.files]
    top = sorted({name.split("/")[0] for name in wheel.names} - {"rtp_llm", wheel.info})
    if top:
        problems.append(f"files outside the package: {top}")
    parser = configparser.ConfigParser()
    parser.read_string(wheel.text("entry_points.txt"))
    scripts = dict(parser["console_scripts"]) if parser.has_section("console_scripts") else {}
    if set(scripts) != {DISTRIBUTION}:
        problems.append(f"console scripts {sorted(scripts)}, expected {DISTRIBUTION}")
    for script, target in scripts.items():
        module, _, function = target.partition(":")
        path = module.replace(".", "/")
        source = wheel.files.get(f"{path}.py") or wheel.files.get(f"{path}/__init__.py")
        if source is None:
            problems.append(f"console script {script}: no module {module} in the wheel")
        elif function not in _defined(source):
            problems.append(f"console script {script}: {module} does not define {function}")
    return problems


def _defined(source: bytes) -> set[str]:
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def needed(data: bytes) -> list[str]:
    """DT_NEEDED of a shared library."""
    elf = ELFFile(io.BytesIO(data))
    return [
        str(tag.needed)  # type: ignore[attr-defined]  # set for DT_NEEDED
        for section in elf.iter_sections()
        if isinstance(section, DynamicSection)
        for tag in section.iter_tags()
        if tag.entry.d_tag == "DT_NEEDED"
    ]


def cuda_major(library: str) -> str | None:
    """The CUDA major that a library's name tells; None where it tells none."""
    found = CUDA_LIBRARY.fullmatch(library)
    if not found:
        return None
    if found["name"] in SAME_MAJOR:
        return found["version"]
    return OTHER_MAJOR.get((found["name"], found["version"]))


def check_libraries(wheel: Wheel, platform: Platform) -> list[str]:
    """Every shared library's DT_NEEDED is in the wheel, in the system, or in torch and what it requires; with one
    CUDA major, the platform's; and no CUDA library is bundled, since torch brings its own."""
    problems = []
    libraries = {name: data for name, data in wheel.files.items() if re.search(r"\.so(\.\d+)*$", name)}
    inside = {PurePosixPath(name).name for name in libraries}
    majors: dict[str, list[str]] = {}
    for name, data in sorted(libraries.items()):
        if CUDA_LIBRARY.fullmatch(PurePosixPath(name).name):
            problems.append(f"{name}: a bundled CUDA library; torch's requirements bring it")
        for library in needed(data):
            major = cuda_major(library)
            if major:
                majors.setdefault(major, []).append(f"{name} needs {library}")
            from_torch = TORCH_LIBRARIES.fullmatch(library) or (platform.accelerator == "cuda" and CUDA_LIBRARY.fullmatch(library))
            if not (library in inside or SYSTEM_LIBRARIES.fullmatch(library) or from_torch):
                problems.append(f"{name}: needs {library}, which neither the wheel nor its requirements have")
    for major, uses in sorted(majors.items()):
        if major != platform.cuda_major:
            problems += [f"{use}: CUDA {major}, the platform has {platform.toolkit or 'none'}" for use in uses]
    return problems


def check(path: Path, platform: Platform, lock: Lock, base: list[str], version: str, urls: bool = True) -> list[str]:
    """Every problem of a wheel, each with its file name in front."""
    wheel = Wheel(path)
    checks: list[Callable[[], list[str]]] = [
        lambda: check_name(wheel, platform, version),
        lambda: check_metadata(wheel, platform, version),
        lambda: check_requirements(wheel, platform, lock, base, urls),
        lambda: check_record(wheel),
        lambda: check_contents(wheel),
        lambda: check_libraries(wheel, platform),
    ]
    return [f"{wheel.file_name}: {problem}" for run in checks for problem in run()]


def project_version(root: Path = ROOT) -> str:
    """The version of rtp_llm/version.py, without importing the package."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "rtp_llm" / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise ValueError("rtp_llm/version.py: no __version__")
    return found[1]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    table = load_table()
    parser.add_argument("wheel", type=Path)
    parser.add_argument("platform", choices=sorted(table.platforms))
    parser.add_argument("--index", action="store_true", help="a wheel of //:wheel_index, without URL requirements")
    options = parser.parse_args(argv)
    lock = parse_lock((ROOT / "deps" / f"requirements_lock_{options.platform}.txt").read_text(encoding="utf-8"))
    problems = check(options.wheel, table.platforms[options.platform], lock, base_requirements(), project_version(), not options.index)
    print("\n".join(problems) or f"{options.wheel.name}: right for {options.platform}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
