"""The lock format: read and written here and nowhere else.

A platform's lock is for one Python on one CPU, so each package has one file: its name and version (or its URL, where
no public index serves it), its sha256, and, as a comment, the name of the file that the hash is of. The header holds
digests of the input and of the body, by which an edit by hand is found without any network.

    numpy==2.4.6 \\
        --hash=sha256:...
        # numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from arch_config.table import Platform

_HEADER = re.compile(r"# (?P<key>input|body) sha256: (?P<value>[0-9a-f]{64})")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Entry:
    """One package of a lock."""

    name: str
    extras: tuple[str, ...]
    version: str
    url: str | None
    sha256: str
    file_name: str

    def render(self) -> str:
        """The entry's three lines."""
        name = f"{self.name}[{','.join(self.extras)}]" if self.extras else self.name
        what = f"{name} @ {self.url}" if self.url else f"{name}=={self.version}"
        return f"{what} \\\n    --hash=sha256:{self.sha256}\n    # {self.file_name}\n"


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock as it was read. ``faults``: lines that do not belong in a lock, in words."""

    entries: tuple[Entry, ...]
    input_digest: str | None
    body_digest: str | None
    actual_body_digest: str
    unverified: tuple[str, ...]
    faults: tuple[str, ...]


def digest(text: str) -> str:
    """sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def input_digest(platform: Platform, base: Sequence[str]) -> str:
    """Digest of all that a lock is resolved from: requirements, torch's own, constraints, Python and CPU."""
    lines = [
        *platform.requires_dist(base),
        *platform.torch_requires,
        *platform.constraints(),
        f"python {platform.python}",
        f"cpu {platform.cpu}",
    ]
    return digest("\n".join(lines))


def version_in_url(url: str) -> str:
    """2.13.0+cpu from .../torch-2.13.0%2Bcpu-cp311-....whl; empty where the file name has no version."""
    parts = unquote(urlsplit(url).path.rsplit("/", 1)[-1]).split("-")
    return parts[1] if len(parts) > 2 else ""


def render_input(platform: Platform) -> str:
    """deps/requirements_<platform>.in."""
    lines = [
        f"# What platform {platform.name} needs: Python {platform.python}, {platform.os} {platform.cpu}.",
        "# Written by deps/update.py from arch_config/platforms.bzl; do not edit.",
        "-r requirements.in",
        *platform.pinned(),
    ]
    lines += [f"# not locked: {line}" for line in platform.unverified()]
    return "\n".join(lines) + "\n"


def render_lock(platform: Platform, base: Sequence[str], entries: Iterable[Entry]) -> str:
    """deps/requirements_lock_<platform>.txt."""
    body = "".join(entry.render() for entry in sorted(entries, key=lambda entry: entry.name))
    lines = [
        f"# Every file that platform {platform.name} needs: Python {platform.python}, {platform.os} {platform.cpu}.",
        "# Written by deps/update.py from the .in file beside it; do not edit.",
        f"# input sha256: {input_digest(platform, base)}",
        f"# body sha256: {digest(body)}",
        *(f"# unverified: {line}" for line in platform.unverified()),
    ]
    return "\n".join(lines) + "\n" + body


def parse_lock(text: str) -> Lock:
    """Reads a lock; lines of another form go to ``faults`` instead of raising, so that all of them are reported."""
    header: dict[str, str] = {}
    unverified: list[str] = []
    entries: list[Entry] = []
    faults: list[str] = []
    body: list[str] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        at += 1
        found = _HEADER.fullmatch(line)
        if found and not body:
            header[found["key"]] = found["value"]
        elif line.startswith("# unverified: ") and not body:
            unverified.append(line.removeprefix("# unverified: "))
        elif line.startswith("#") and not body:
            continue
        else:
            block = [line]
            while at < len(lines) and lines[at].startswith(" "):
                block.append(lines[at])
                at += 1
            body.extend(block)
            entry, fault = _parse_entry(block)
            if entry:
                entries.append(entry)
            faults.extend(fault)
    return Lock(
        entries=tuple(entries),
        input_digest=header.get("input"),
        body_digest=header.get("body"),
        actual_body_digest=digest("".join(line + "\n" for line in body)),
        unverified=tuple(unverified),
        faults=tuple(faults),
    )


def _parse_entry(block: list[str]) -> tuple[Entry | None, list[str]]:
    what = block[0].rstrip("\\").strip()
    if what.startswith("-"):
        return None, [f"{what}: option lines (indexes, hosts, files) do not belong in a lock"]
    name, version, url = what, "", None
    if " @ " in what:
        name, url = what.split(" @ ", 1)
        version = version_in_url(url)
    elif "==" in what:
        name, version = what.split("==", 1)
    name, _, extras = name.strip().removesuffix("]").partition("[")
    faults = []
    if ";" in what or not version or " " in version:
        faults.append(f"{what}: expected name==version or name @ url, without a marker")
    rest = "\n".join(block[1:])
    hashes = _HASH.findall(rest)
    files = [line.strip().removeprefix("# ") for line in block[1:] if line.strip().startswith("# ")]
    if len(hashes) != 1:
        faults.append(f"{name}: expected one sha256, found {len(hashes)}")
    if len(files) != 1:
        faults.append(f"{name}: expected the name of one file, found {len(files)}")
    entry = Entry(
        name, tuple(e for e in extras.split(",") if e), version.strip(), url, hashes[0] if hashes else "", files[0] if files else ""
    )
    return entry, faults
