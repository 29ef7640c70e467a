"""Python's view of the platform table: ``platforms.bzl`` read with ``ast``, checked, and what follows from a row.

Nothing here states a fact about a platform; the table does. Used by the lock updater, the checks and the tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging import tags
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).absolute().parent.parent
TABLE = ROOT / "arch_config" / "platforms.bzl"
REQUIREMENTS = ROOT / "deps" / "requirements.in"

#: The oldest manylinux that exists for a CPU: glibc 2.5 on x86-64, 2.17 on aarch64.
OLDEST_GLIBC_MINOR = {"x86_64": 5, "aarch64": 17}

#: What ``requires_known`` may say, and whether torch's own requirements were seen in the file or at the index.
REQUIRES_KNOWN = {"read": True, "index": True, "reported": False, "partial": False}


class TableError(ValueError):
    """The table does not have the form that its docstring states; the message names the row and the field."""


@dataclass(frozen=True, slots=True)
class Artefact:
    """One file that a platform needs: by name and version, and by URL and sha256 where no public index serves it."""

    name: str
    version: str
    url: str | None
    sha256: str | None

    @property
    def file_name(self) -> str | None:
        """File name at the end of the URL, unquoted; None without a URL."""
        return unquote(urlsplit(self.url).path.rsplit("/", 1)[-1]) if self.url else None

    def requirement(self, urls: bool = True) -> str:
        """As Requires-Dist says it: ``name @ url#sha256=...``, or ``name==version`` (``urls=False``: always)."""
        if urls and self.url:
            return f"{self.name} @ {self.url}#sha256={self.sha256}"
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class Platform:
    """One row; fields are those of ``platforms.bzl``'s docstring."""

    name: str
    os: str
    cpu: str
    accelerator: str
    toolkit: str
    python: str
    torch: Artefact
    torch_requires: tuple[str, ...]
    requires_known: str
    companions: tuple[Artefact, ...]
    flashinfer: tuple[str, ...]
    flashinfer_version: str | None
    fastsafetensors: str | None
    wheel_tag: str
    local_version: str

    @property
    def cuda_major(self) -> str | None:
        """``"12"``, ``"13"``; None where the accelerator is not CUDA."""
        return self.toolkit.split(".")[0] if self.accelerator == "cuda" else None

    @property
    def manylinux(self) -> tuple[str, ...]:
        """Platform tags that pip would take here, best first."""
        oldest = OLDEST_GLIBC_MINOR[self.cpu]
        legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
        found: list[str] = []
        for minor in range(28, oldest - 1, -1):
            found.append(f"manylinux_2_{minor}_{self.cpu}")
            if minor in legacy:
                found.append(f"{legacy[minor]}_{self.cpu}")
        return (*found, f"linux_{self.cpu}")

    def tags(self) -> tuple[tags.Tag, ...]:
        """Wheel tags that the platform's Python takes, best first."""
        version = tuple(int(part) for part in self.python.split("."))
        interpreter = "cp" + self.python.replace(".", "")
        own = tags.cpython_tags(version, abis=[interpreter], platforms=self.manylinux)
        shared = tags.compatible_tags(version, interpreter=interpreter, platforms=self.manylinux)
        return (*own, *shared)

    def marker_environment(self) -> dict[str, str]:
        """What environment markers see on this platform."""
        return {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.cpu,
            "platform_python_implementation": "CPython",
            "platform_system": self.os.capitalize(),
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": self.os,
            "extra": "",
        }

    def pinned(self, urls: bool = True) -> list[str]:
        """The platform-sensitive requirements: torch, its companions, flashinfer, fastsafetensors."""
        found = [self.torch.requirement(urls)]
        found += [companion.requirement() for companion in self.companions if urls and companion.sha256]
        found += [f"{name}=={self.flashinfer_version}" for name in self.flashinfer]
        if self.fastsafetensors:
            found.append(f"fastsafetensors=={self.fastsafetensors}")
        return found

    def requires_dist(self, base: Sequence[str], urls: bool = True) -> list[str]:
        """Requires-Dist of the platform's wheel: requirements.in, with the table's exact ones in place of its ranges; sorted."""
        exact = {distribution(line) for line in self.pinned(urls)}
        return sorted([line for line in base if distribution(line) not in exact] + self.pinned(urls))

    def constraints(self) -> list[str]:
        """Bounds for packages that the lock has through others alone: NVIDIA's bindings follow the CUDA major."""
        return [f"cuda-bindings>={self.cuda_major},<{int(self.cuda_major) + 1}"] if self.cuda_major else []

    def wheel_name(self, distribution_name: str, version: str) -> str:
        """File name of the platform's wheel."""
        return f"{distribution_name.replace('-', '_')}-{version}+{self.local_version}-{self.wheel_tag}.whl"

    def unverified(self) -> list[str]:
        """What the table knows without having seen it, in words."""
        found = []
        for companion in self.companions:
            unknown = [what for what, value in (("URL", companion.url), ("sha256", companion.sha256)) if not value]
            if unknown:
                found.append(f"{self.name}: {companion.name} {companion.version}: no known {' and '.join(unknown)}")
        if self.torch.url and not self.torch.sha256:
            found.append(f"{self.name}: torch {self.torch.version}: no known sha256")
        if not REQUIRES_KNOWN[self.requires_known]:
            found.append(f"{self.name}: torch {self.torch.version}: its own requirements are {self.requires_known}, not read from the file")
        return found


def distribution(requirement: str) -> str:
    """Canonical name of a requirement line."""
    return canonicalize_name(Requirement(requirement).name)


def literals(text: str) -> dict[str, Any]:
    """Top-level assignments of a .bzl that is a plain literal.  Raises TableError for anything else in it."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            continue
        if not (isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name)):
            raise TableError(f"platforms.bzl line {node.lineno}: expected NAME = literal")
        try:
            found[node.targets[0].id] = ast.literal_eval(node.value)
        except ValueError as error:
            raise TableError(f"platforms.bzl line {node.lineno}: {node.targets[0].id} is not a plain literal: {error}") from error
    return found


FIELDS = {
    "os", "cpu", "accelerator", "toolkit", "python", "torch", "companions", "flashinfer", "fastsafetensors", "wheel_tag", "local_version",
}  # fmt: skip
TORCH_FIELDS = {"version", "url", "sha256", "requires", "requires_known"}
COMPANION_FIELDS = {"name", "version", "url", "sha256"}


def _check_fields(where: str, row: Mapping[str, Any], expected: set[str]) -> list[str]:
    problems = [f"{where}: no field {name}" for name in sorted(expected - set(row))]
    return problems + [f"{where}: unknown field {name}" for name in sorted(set(row) - expected)]


def _problems(name: str, row: Mapping[str, Any], variants: Mapping[str, Sequence[str]]) -> list[str]:
    problems = _check_fields(name, row, FIELDS)
    problems += _check_fields(f"{name}.torch", row.get("torch", {}), TORCH_FIELDS)
    for companion in row.get("companions", []):
        problems += _check_fields(f"{name}.companions", companion, COMPANION_FIELDS)
    if problems:
        return problems
    torch, flashinfer = row["torch"], row["flashinfer"]
    interpreter, _, platform_tag = row["wheel_tag"].split("-")
    tests = (
        (row["cpu"] in OLDEST_GLIBC_MINOR, f"cpu {row['cpu']}: one of {sorted(OLDEST_GLIBC_MINOR)}"),
        (row["accelerator"] in ("cuda", "rocm", "none"), f"accelerator {row['accelerator']}: cuda, rocm or none"),
        (torch["requires_known"] in REQUIRES_KNOWN, f"torch.requires_known {torch['requires_known']}: one of {sorted(REQUIRES_KNOWN)}"),
        ((torch["url"] is None) == (torch["requires_known"] == "index"), "torch: a url, or requires_known index: one of the two"),
        (flashinfer.get("variant") in variants, f"flashinfer.variant {flashinfer.get('variant')}: one of {sorted(variants)}"),
        (
            bool(flashinfer.get("version")) == bool(variants.get(flashinfer.get("variant"))),
            "flashinfer.version: set where the variant has packages",
        ),
        (interpreter == "cp" + row["python"].replace(".", ""), f"wheel_tag {row['wheel_tag']}: not for Python {row['python']}"),
        (platform_tag.endswith(row["cpu"]), f"wheel_tag {row['wheel_tag']}: not for {row['cpu']}"),
    )
    problems += [f"{name}: {message}" for holds, message in tests if not holds]
    for url, sha256 in [(torch["url"], torch["sha256"])] + [(c["url"], c["sha256"]) for c in row["companions"]]:
        if sha256 is not None and not re.fullmatch(r"[0-9a-f]{64}", sha256):
            problems.append(f"{name}: sha256 {sha256}: 64 hexadecimal digits, or None where it is not known")
        if sha256 is not None and url is None:
            problems.append(f"{name}: a sha256 without the URL of its file")
    return problems


def _artefact(name: str, row: Mapping[str, Any]) -> Artefact:
    return Artefact(name=name, version=row["version"], url=row["url"], sha256=row["sha256"])


@dataclass(frozen=True, slots=True)
class Table:
    """The whole table: platforms by name, and the packages that may carry two CUDA majors."""

    platforms: Mapping[str, Platform]
    both_cuda_majors: frozenset[str]


def parse_table(text: str) -> Table:
    """The table from the text of platforms.bzl.  Raises TableError with every problem at once."""
    values = literals(text)
    rows, variants = values["PLATFORMS"], values["FLASHINFER_VARIANTS"]
    problems = [problem for name, row in rows.items() for problem in _problems(name, row, variants)]
    if problems:
        raise TableError("platforms.bzl:\n  " + "\n  ".join(problems))
    platforms = {
        name: Platform(
            name=name,
            **{
                field: row[field]
                for field in ("os", "cpu", "accelerator", "toolkit", "python", "fastsafetensors", "wheel_tag", "local_version")
            },
            torch=_artefact("torch", row["torch"]),
            torch_requires=tuple(row["torch"]["requires"]),
            requires_known=row["torch"]["requires_known"],
            companions=tuple(_artefact(c["name"], c) for c in row["companions"]),
            flashinfer=tuple(variants[row["flashinfer"]["variant"]]),
            flashinfer_version=row["flashinfer"]["version"],
        )
        for name, row in rows.items()
    }
    return Table(platforms=platforms, both_cuda_majors=frozenset(values["BOTH_CUDA_MAJORS"]))


def load_table(path: Path = TABLE) -> Table:
    """``parse_table`` of a file."""
    return parse_table(path.read_text(encoding="utf-8"))


def requirement_lines(text: str) -> list[str]:
    """Requirements of a .in file, without comments and blank lines, in order."""
    return [line for raw in text.splitlines() if (line := raw.split(" #")[0].strip()) and not line.startswith("#")]


def base_requirements(path: Path = REQUIREMENTS) -> list[str]:
    """Lines of deps/requirements.in."""
    return requirement_lines(path.read_text(encoding="utf-8"))
