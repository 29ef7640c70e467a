"""Packs files into a wheel (PEP 427), the same bytes on every machine.

Names, licence, scripts and classifiers come from pyproject.toml; version, tag and requirements from the command line,
where Bazel's platform table has put them. Entries are stored uncompressed: deflate's output depends on the zlib
beneath Python, and a wheel must be the same whoever builds it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import tomllib

#: The zip format begins in 1980; earlier times cannot be written.
ZIP_EPOCH = 315532800


def zip_time(environment: str | None) -> tuple[int, int, int, int, int, int]:
    """The time of every entry: SOURCE_DATE_EPOCH (seconds since 1970, UTC), and 1980 where it is unset or earlier."""
    seconds = max(int(environment), ZIP_EPOCH) if environment else ZIP_EPOCH
    moment = time.gmtime(seconds)
    return (moment.tm_year, moment.tm_mon, moment.tm_mday, moment.tm_hour, moment.tm_min, moment.tm_sec // 2 * 2)


def metadata(project: dict[str, Any], version: str, python: str, requires: list[str], licenses: list[str], readme: str) -> str:
    """METADATA, version 2.4 of the core metadata: the first with License-Expression and License-File together."""
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project['name']}",
        f"Version: {version}",
        f"Summary: {project['description']}",
        f"License-Expression: {project['license']}",
        *(f"License-File: {name}" for name in sorted(licenses)),
        *(f"Classifier: {line}" for line in project.get("classifiers", [])),
        f"Requires-Python: =={python}.*",
        *(f"Requires-Dist: {line}" for line in sorted(requires)),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + "\n\n" + readme


def entry_points(project: dict[str, Any]) -> str:
    """entry_points.txt, with the console scripts of pyproject.toml."""
    scripts = project.get("scripts", {})
    return "[console_scripts]\n" + "".join(f"{name} = {scripts[name]}\n" for name in sorted(scripts))


def record_line(name: str, data: bytes) -> str:
    """One line of RECORD: path, urlsafe sha256 without padding, size."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def write_wheel(out: Path, files: dict[str, bytes], info: str, moment: tuple[int, int, int, int, int, int]) -> None:
    """Sorted entries, RECORD last; a path that a zip or RECORD could not carry plainly is refused."""
    odd = sorted(name for name in files if name.startswith(("/", "../")) or any(c in name for c in ',"\n\\'))
    if odd:
        raise SystemExit(f"build_wheel: file names that a wheel cannot carry: {', '.join(odd)}")
    record = "".join(record_line(name, files[name]) for name in sorted(files)) + f"{info}/RECORD,,\n"
    entries = [*((name, files[name]) for name in sorted(files)), (f"{info}/RECORD", record.encode())]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries:
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system = 3  # Unix, on every host
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)


def pairs(lines: list[str]) -> dict[str, bytes]:
    """DESTINATION=SOURCE lines -> destination: bytes."""
    found: dict[str, bytes] = {}
    for line in lines:
        destination, source = line.split("=", 1)
        if destination in found:
            raise SystemExit(f"build_wheel: {destination} is given twice")
        found[destination] = Path(source).read_bytes()
    return found


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    for name in ("out", "pyproject", "readme"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("version", "tag", "python"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("requires", "file", "license"):
        parser.add_argument(f"--{name}", action="append", default=[])
    options = parser.parse_args(argv)

    project = tomllib.loads(options.pyproject.read_text(encoding="utf-8"))["project"]
    info = f"{project['name'].replace('-', '_')}-{options.version}.dist-info"
    licenses = pairs(options.license)
    expected = set(project.get("license-files", []))
    if expected != set(licenses):
        raise SystemExit(f"build_wheel: licence files {sorted(licenses)}, pyproject.toml names {sorted(expected)}")
    files = pairs(options.file)
    readme = options.readme.read_text(encoding="utf-8")
    wheel = f"Wheel-Version: 1.0\nGenerator: rtp-llm build_wheel\nRoot-Is-Purelib: false\nTag: {options.tag}\n"
    files |= {f"{info}/licenses/{name}": data for name, data in licenses.items()}
    files[f"{info}/METADATA"] = metadata(project, options.version, options.python, options.requires, list(licenses), readme).encode()
    files[f"{info}/WHEEL"] = wheel.encode()
    files[f"{info}/entry_points.txt"] = entry_points(project).encode()
    write_wheel(options.out, files, info, zip_time(os.environ.get("SOURCE_DATE_EPOCH")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
