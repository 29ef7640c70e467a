"""What a platform's requirements resolve to, asked of uv for that platform's own Python and CPU.

uv resolves for a machine that is not this one, and names every file. A torch build that no public index serves is
described to uv by the table where its host cannot be reached; elsewhere uv reads it from the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from arch_config.table import Platform, requirement_lines
from deps.locks import Entry, Lock, render_input

#: A host that has not answered a HEAD request in this many seconds counts as out of reach.
REACH_SECONDS = 10

#: uv's glibc-2.28 targets: the platform of every wheel_tag.
UV_PLATFORM = {"x86_64": "x86_64-manylinux_2_28", "aarch64": "aarch64-manylinux_2_28"}


class ResolveError(RuntimeError):
    """uv could not resolve a platform's requirements; the message is uv's."""


def reachable(url: str) -> bool:
    """Whether a file can be had from its host."""
    try:
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=REACH_SECONDS):
            return True
    except (urllib.error.URLError, TimeoutError, OSError):
        return False


def uv_config(platform: Platform) -> str:
    """uv.toml: torch's requirements from the table where its file cannot be reached, and nothing else."""
    torch = platform.torch
    if not torch.url or reachable(torch.url):
        return ""
    # A JSON string and a JSON list of strings are TOML too.
    return (
        "[[dependency-metadata]]\n"
        'name = "torch"\n'
        f"version = {json.dumps(torch.version)}\n"
        f"requires-dist = {json.dumps(list(platform.torch_requires))}\n"
    )


def run_uv(work: Path, *arguments: str) -> None:
    command = [find_uv_bin(), "--config-file", str(work / "uv.toml"), "pip", "compile", "--quiet", "--no-header", *arguments]
    # No interpreter of this machine may have a say: the platform's own version and CPU are given.
    done = subprocess.run(
        command, cwd=work, capture_output=True, text=True, check=False, env={**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    )
    if done.returncode:
        raise ResolveError(done.stderr.strip())


def resolve(platform: Platform, base: str, current: Lock | None, upgrade: bool) -> list[Entry]:
    """Every file that the platform needs, sorted by name.

    ``base`` is the text of requirements.in.  Versions of ``current`` are kept where they still fit, unless
    ``upgrade``.  Raises ResolveError.
    """
    with tempfile.TemporaryDirectory(prefix="rtp-lock-") as folder:
        work = Path(folder)
        (work / "uv.toml").write_text(uv_config(platform))
        (work / "requirements.in").write_text(base)
        (work / "platform.in").write_text(render_input(platform))
        pins = work / "pins.txt"
        if current and not upgrade:
            pins.write_text("".join(f"{entry.name}=={entry.version}\n" for entry in current.entries if not entry.url))
        (work / "constraints.txt").write_text("".join(line + "\n" for line in platform.constraints()))
        target = ["--python-platform", UV_PLATFORM[platform.cpu], "--python-version", platform.python, "--only-binary", ":all:"]
        run_uv(work, "platform.in", "-c", "constraints.txt", *target, "--no-annotate", "--no-strip-extras", "-o", pins.name)
        run_uv(work, pins.name, *target, "--no-deps", "--format", "pylock.toml", "-o", "pylock.toml")
        extras = {str(canonicalize_name(r.name)): tuple(sorted(r.extras)) for r in map(Requirement, requirement_lines(pins.read_text()))}
        packages = tomllib.loads((work / "pylock.toml").read_text())["packages"]
    environment = platform.marker_environment()
    wanted = [package for package in packages if "marker" not in package or Marker(package["marker"]).evaluate(environment)]
    return sorted((_entry(platform, package, extras) for package in wanted), key=lambda entry: entry.name)


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _entry(platform: Platform, package: dict[str, Any], extras: dict[str, tuple[str, ...]]) -> Entry:
    name = canonicalize_name(package["name"])
    if "archive" in package:
        url, sha256 = package["archive"]["url"], package["archive"]["hashes"]["sha256"]
        return Entry(name, extras.get(name, ()), package["version"], url, sha256, _file_name(url))
    best = {tag: rank for rank, tag in enumerate(platform.tags())}
    ranked = []
    for wheel in package.get("wheels", []):
        file_name = wheel.get("name") or _file_name(wheel["url"])
        try:
            fits = [best[tag] for tag in parse_wheel_filename(file_name)[3] if tag in best]
        except InvalidWheelFilename:
            continue
        if fits:
            ranked.append((min(fits), file_name, wheel["hashes"]["sha256"]))
    if not ranked:
        raise ResolveError(f"{platform.name}: {name} {package['version']}: no wheel for Python {platform.python} on {platform.cpu}")
    _, file_name, sha256 = min(ranked)
    return Entry(name, extras.get(name, ()), package["version"], None, sha256, file_name)
