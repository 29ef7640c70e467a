"""What a lock may hold. Each check returns every problem it finds, in words that say what to do; none needs network.

python -m deps.policy        checks the real files; exit code 1 with all problems
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from arch_config.table import ROOT, Platform, Table, base_requirements, load_table
from deps.generated import bazelrc, module_hubs
from deps.locks import Entry, Lock, input_digest, parse_lock, render_input

#: Endings of names that only an inside network resolves (RFC 6762, RFC 8375, RFC 2606, and common habit).
PRIVATE_SUFFIXES = (".local", ".internal", ".intranet", ".corp", ".lan", ".home.arpa", ".localhost", ".test", ".example", ".invalid")

#: A build tag inside a version or a file name: torch2.1.2, torch29, cu121, cu129torch2.9, rocm6.4.
TORCH_TAG = re.compile(r"(?:^|[.+_-]|cu\d{2,3})(?:pt|torch)(\d+(?:\.\d+)*)")
CUDA_TAG = re.compile(r"(?:^|[.+_-]|torch[\d.]+)cu(?:da)?-?(\d{2,3})(?![\d])")
ROCM_TAG = re.compile(r"(?:^|[.+_-])rocm(\d+(?:\.\d+)*)")

#: Packages whose own version is that of the CUDA toolkit they belong to.
TOOLKIT_PACKAGES = {"cuda-bindings", "cuda-python", "cuda-toolkit"}

#: What mends a generated file.
UPDATE = "bazel run //deps:update"


@dataclass(frozen=True, slots=True)
class Files:
    """What the checks look at: the table, the base requirements, and for each platform its input and lock."""

    table: Table
    base: list[str]
    inputs: Mapping[str, str]
    locks: Mapping[str, str]
    bazelrc: str
    module_hubs: str
    metadata_tests: frozenset[str] | None = None

    def lock(self, name: str) -> Lock:
        return parse_lock(self.locks[name])


def host_problem(url: str) -> str | None:
    """Why a URL is not a public https one; None where it is."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower()
    if parts.scheme != "https":
        return f"scheme {parts.scheme or 'none'}, expected https"
    if parts.username or parts.password:
        return "carries credentials"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        return f"host {host} is an address, expected a public name"
    if "." not in host or host.endswith(PRIVATE_SUFFIXES) or re.search(r"(^|[.-])(internal|inc)[.-]", host):
        return f"host {host} is an internal one, expected a public name"
    return None


def check_form(name: str, platform: Platform, lock: Lock, base: list[str]) -> list[str]:
    """The lock has the form that deps/locks.py writes, and is what it wrote: digests of input and body match."""
    problems = [f"{name}: {fault}" for fault in lock.faults]
    names = [entry.name for entry in lock.entries]
    problems += [f"{name}: {twice} is there twice" for twice in sorted({n for n in names if names.count(n) > 1})]
    problems += [f"{name}: {n} is not a normalised name" for n in names if canonicalize_name(n) != n]
    if names != sorted(names):
        problems.append(f"{name}: entries are not sorted")
    if lock.body_digest != lock.actual_body_digest:
        problems.append(f"{name}: edited by hand (body sha256 {lock.actual_body_digest}, header says {lock.body_digest}): {UPDATE}")
    if lock.input_digest != input_digest(platform, base):
        problems.append(f"{name}: the table or requirements.in changed since it was made: {UPDATE} -- --platform {name}")
    if list(lock.unverified) != platform.unverified():
        problems.append(f"{name}: its list of what is unverified differs from the table's: {UPDATE}")
    return problems


def check_sources(name: str, platform: Platform, lock: Lock) -> list[str]:
    """URLs are public https ones, and exactly the table's, with the table's hashes."""
    problems = []
    allowed = {a.url: a for a in (platform.torch, *platform.companions) if a.url}
    for entry in lock.entries:
        if entry.url is None:
            continue
        fault = host_problem(entry.url)
        if fault:
            problems.append(f"{name}: {entry.name}: {fault}: {entry.url}")
        artefact = allowed.get(entry.url)
        if artefact is None:
            problems.append(f"{name}: {entry.name}: a URL that the table does not name: {entry.url}")
        elif artefact.sha256 != entry.sha256:
            problems.append(f"{name}: {entry.name}: sha256 {entry.sha256}, the table says {artefact.sha256}")
    return problems


def check_files(name: str, platform: Platform, lock: Lock) -> list[str]:
    """Each file is the named version, a wheel, and one that the platform's Python and CPU take."""
    problems = []
    takes = frozenset(platform.tags())
    for entry in lock.entries:
        try:
            distribution, version, _, tags = parse_wheel_filename(entry.file_name)
        except (InvalidWheelFilename, InvalidVersion) as error:
            problems.append(f"{name}: {entry.name}: {error}")
            continue
        if distribution != entry.name or version != Version(entry.version):
            problems.append(f"{name}: {entry.name} {entry.version}: its file is {entry.file_name}")
        if not takes & tags:
            problems.append(f"{name}: {entry.file_name}: not for Python {platform.python} on {platform.cpu}")
    return problems


def _versions_agree(tag: str, version: str) -> bool:
    """2.13 and 2.13.0 and 213 agree with 2.13.0+cu129; 2.1.2 does not."""
    release = list(Version(version).release)
    if "." in tag:
        parts = [int(part) for part in tag.split(".")]
        return parts == release[: len(parts)]
    return tag in {"".join(map(str, release[:count])) for count in (1, 2, 3)}


def _build_problems(platform: Platform, entry: Entry, both_majors: frozenset[str]) -> list[str]:
    text = f"{entry.file_name} {entry.version}".lower()
    problems = []
    for tag in TORCH_TAG.findall(text):
        if entry.name != "torch" and not _versions_agree(tag, platform.torch.version):
            problems.append(f"built for torch {tag}, the platform has {platform.torch.version}")
    toolkit = platform.toolkit.replace(".", "")
    if entry.name not in both_majors:
        for tag in CUDA_TAG.findall(text) + re.findall(r"-cu(\d{2})$", entry.name):
            if platform.accelerator != "cuda":
                problems.append(f"built for CUDA {tag}, the platform has no CUDA")
            elif len(tag) == 2 and tag != platform.cuda_major or len(tag) == 3 and tag != toolkit:
                problems.append(f"built for CUDA {tag}, the platform has {platform.toolkit}")
    for tag in ROCM_TAG.findall(text):
        if platform.accelerator != "rocm" or tag != platform.toolkit:
            problems.append(f"built for ROCm {tag}, the platform has {platform.accelerator} {platform.toolkit}".rstrip())
    if entry.name in TOOLKIT_PACKAGES and entry.version.split(".")[0] != platform.cuda_major:
        problems.append(f"belongs to CUDA {entry.version.split('.')[0]}, the platform has {platform.toolkit or 'no CUDA'}")
    return sorted(set(problems))


def check_builds(name: str, platform: Platform, lock: Lock, both_majors: frozenset[str]) -> list[str]:
    """No file was built for another torch, CUDA or ROCm than the platform's, as far as names and versions tell."""
    return [f"{name}: {entry.file_name}: {problem}" for entry in lock.entries for problem in _build_problems(platform, entry, both_majors)]


def check_variants(locks: Mapping[str, Lock]) -> list[str]:
    """One hash is one file: never that of two variants, whether in one lock or in two."""
    seen: dict[str, dict[tuple[str, str | None], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, lock in locks.items():
        for entry in lock.entries:
            if entry.sha256:
                seen[entry.sha256][entry.file_name, entry.url].append(name)
    return [
        f"one sha256 {sha256} for two files: "
        + "; ".join(f"{file} ({', '.join(where)})" for (file, _), where in sorted(files.items(), key=str))
        for sha256, files in sorted(seen.items())
        if len(files) > 1
    ]


def check_agreement(name: str, platform: Platform, text: str, lock: Lock, base: list[str]) -> list[str]:
    """Table, input and lock say the same: the input is what the table gives, and the lock satisfies each line of it."""
    problems = []
    if text != render_input(platform):
        problems.append(f"requirements_{name}.in is not what the table gives: {UPDATE}")
    locked = {entry.name: entry for entry in lock.entries}
    pinned = [platform.torch, *(companion for companion in platform.companions if companion.sha256)]
    for artefact in pinned:
        entry = locked.get(artefact.name)
        if entry is None:
            problems.append(f"{name}: {artefact.name} is not in the lock, the table has {artefact.version}")
        elif (entry.version, entry.url) != (artefact.version, artefact.url):
            was = f"{entry.version} from {entry.url or 'the index'}"
            problems.append(f"{name}: {artefact.name} {was}, the table has {artefact.version} from {artefact.url or 'the index'}")
    for line in [*base, *platform.pinned(urls=False)[1:]]:
        wanted = Requirement(line)
        entry = locked.get(canonicalize_name(wanted.name))
        if entry is None:
            problems.append(f"{name}: {wanted.name} is required and not in the lock")
        elif entry.name != "torch" and not wanted.specifier.contains(entry.version, prereleases=True):
            problems.append(f"{name}: {entry.name} {entry.version}, required is {wanted}")
    for distribution in ("flashinfer-python", "flashinfer-cubin", "fastsafetensors"):
        if distribution in locked and distribution not in {Requirement(line).name for line in platform.pinned()}:
            problems.append(f"{name}: {distribution} {locked[distribution].version} is in the lock, the table has none")
    return problems


def check_coverage(files: Files) -> list[str]:
    """Every platform of the table has input, lock, config, hub and metadata test, and nothing is left of another."""
    problems = []
    known = set(files.table.platforms)
    parts = {"input": set(files.inputs), "lock": set(files.locks)}
    if files.metadata_tests is not None:
        parts["wheel metadata test"] = set(files.metadata_tests)
    for what, have in parts.items():
        problems += [f"{name}: no {what}: {UPDATE}" for name in sorted(known - have)]
        problems += [f"{name}: a {what} of a platform that the table does not have" for name in sorted(have - known)]
    if files.bazelrc != bazelrc(files.table):
        problems.append(f"arch_config/platforms.bazelrc is not what the table gives: {UPDATE}")
    if files.module_hubs != module_hubs(files.table):
        problems.append(f"bazel/pip/hubs.MODULE.bazel is not what the table gives: {UPDATE}")
    return problems


def check_all(files: Files) -> list[str]:
    """Every problem of every lock."""
    problems = check_coverage(files)
    common = [name for name in files.table.platforms if name in files.locks and name in files.inputs]
    locks = {name: files.lock(name) for name in common}
    for name, lock in locks.items():
        platform = files.table.platforms[name]
        problems += check_form(name, platform, lock, files.base)
        problems += check_sources(name, platform, lock)
        problems += check_files(name, platform, lock)
        problems += check_builds(name, platform, lock, files.table.both_cuda_majors)
        problems += check_agreement(name, platform, files.inputs[name], lock, files.base)
    return problems + check_variants(locks)


def read_files(root: Path = ROOT, metadata_tests: frozenset[str] | None = None) -> Files:
    """The real files of the tree; ``metadata_tests`` are the platforms that have one, where the caller knows."""
    table = load_table(root / "arch_config" / "platforms.bzl")
    deps = root / "deps"

    def texts(prefix: str, suffix: str) -> dict[str, str]:
        # requirements_dev.txt and requirements_lock_tools.txt are no platform's.
        found = {path.name.removeprefix(prefix).removesuffix(suffix): path for path in deps.glob(f"{prefix}*{suffix}")}
        return {name: path.read_text(encoding="utf-8") for name, path in found.items() if name != "tools"}

    return Files(
        table=table,
        base=base_requirements(deps / "requirements.in"),
        inputs=texts("requirements_", ".in"),
        locks=texts("requirements_lock_", ".txt"),
        bazelrc=(root / "arch_config" / "platforms.bazelrc").read_text(encoding="utf-8"),
        module_hubs=(root / "bazel" / "pip" / "hubs.MODULE.bazel").read_text(encoding="utf-8"),
        metadata_tests=metadata_tests,
    )


def main() -> int:
    files = read_files()
    problems = check_all(files)
    for problem in problems:
        print(problem)
    for platform in files.table.platforms.values():
        for line in platform.unverified():
            print(f"unverified: {line}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
