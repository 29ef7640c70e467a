"""Copies Debian's rules_python 0.22.1 and teaches its two extensions the tags that MODULE.bazel uses.

    overlay.py SOURCE DESTINATION

rules_python 1.x has hub_name, python_version and is_default, and takes one hub for several Pythons; 0.22.1 does not.
So the Bazel 7 lane checks MODULE.bazel's tags against these edits, not against rules_python 1.x.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

#: File -> (old, new) pairs; every old text must be there.
EDITS = {
    "python/extensions/pip.bzl": (
        ('"name": attr.string(mandatory = True),', '"hub_name": attr.string(mandatory = True),\n        "python_version": attr.string(),'),
        ("attr.name", "attr.hub_name"),
        ("incompatible_generate_aliases = attr.incompatible_generate_aliases", "incompatible_generate_aliases = True"),
        # One hub for the first Python only: this machine has one.
        ("for attr in mod.tags.parse:", "for attr in {tag.hub_name: tag for tag in reversed(mod.tags.parse)}.values():"),
    ),
    "python/extensions/python.bzl": (
        # No download: the toolchain that finds python3 on PATH serves.
        ("        for toolchain_attr in mod.tags.toolchain:", "        for toolchain_attr in []:"),
        ('"name": attr.string(mandatory = True),', '"is_default": attr.bool(),\n                "name": attr.string(),'),
    ),
}


def main(source: Path, destination: Path) -> None:
    shutil.rmtree(destination, ignore_errors=True)
    shutil.copytree(source, destination)
    for name, pairs in EDITS.items():
        path = destination / name
        text = path.read_text()
        for old, new in pairs:
            if old not in text:
                sys.exit(f"overlay: {name} has no {old!r}: another rules_python than 0.22.1?")
            text = text.replace(old, new)
        path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
