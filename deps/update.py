"""Writes everything that follows from the platform table: inputs, locks, .bazelrc configs, MODULE.bazel's hubs, docs.

bazel run //deps:update                              every platform, keeping versions that still fit
bazel run //deps:update -- --platform cuda13         one platform's lock
bazel run //deps:update -- --upgrade                 newest versions
bazel run //deps:update -- --check                   changes nothing; exit code 1 and a diff where a file is out of date
bazel run //deps:update -- --offline                 all but the locks, which alone need the package index
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from arch_config.table import ROOT, Table, base_requirements, load_table
from deps.generated import bazelrc, bzlmod_bazelrc, docs_table, module_hubs, with_table
from deps.locks import parse_lock, render_input, render_lock
from deps.resolve import ResolveError, resolve, run_uv


def offline_files(root: Path, table: Table) -> Iterator[tuple[Path, str]]:
    """Every generated file but the locks: path and contents."""
    yield root / "arch_config" / "platforms.bazelrc", bazelrc(table)
    yield root / "bazel" / "compat" / "platforms_bzlmod.bazelrc", bzlmod_bazelrc(table)
    yield root / "bazel" / "pip" / "hubs.MODULE.bazel", module_hubs(table)
    docs = root / "docs" / "packaging.md"
    if docs.exists():
        yield docs, with_table(docs.read_text(encoding="utf-8"), docs_table(table))
    for platform in table.platforms.values():
        yield root / "deps" / f"requirements_{platform.name}.in", render_input(platform)


def lock_file(root: Path, table: Table, name: str, upgrade: bool) -> tuple[Path, str]:
    """One platform's lock: path and contents.  Raises ResolveError."""
    path = root / "deps" / f"requirements_lock_{name}.txt"
    source = root / "deps" / "requirements.in"
    current = parse_lock(path.read_text(encoding="utf-8")) if path.exists() else None
    platform = table.platforms[name]
    entries = resolve(platform, source.read_text(encoding="utf-8"), current, upgrade)
    return path, render_lock(platform, base_requirements(source), entries)


def tools_lock(root: Path, upgrade: bool) -> tuple[Path, str]:
    """The lock of what tests and tools need on any machine: every file of every version, with markers."""
    path = root / "deps" / "requirements_lock_tools.txt"
    header = "# What tests and tools need, on any machine. Written by deps/update.py from tools.in; do not edit.\n"
    with tempfile.TemporaryDirectory(prefix="rtp-lock-") as folder:
        work = Path(folder)
        (work / "uv.toml").write_text((root / "deps" / "tools.uv.toml").read_text(encoding="utf-8"))
        (work / "tools.in").write_text((root / "deps" / "tools.in").read_text(encoding="utf-8"))
        # What lane cpu's tests import beside the platform's own packages: one version of what both have.
        cpu = root / "deps" / "requirements_lock_cpu.txt"
        shared = parse_lock(cpu.read_text(encoding="utf-8")).entries if cpu.exists() else ()
        (work / "shared.txt").write_text("".join(f"{e.name}=={e.version}\n" for e in shared if not e.url))
        if path.exists() and not upgrade:
            (work / "out.txt").write_text(path.read_text(encoding="utf-8"))
        target = ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-annotate"]
        run_uv(work, "tools.in", "-c", "shared.txt", *target, "-o", "out.txt")
        return path, header + (work / "out.txt").read_text()


def show(path: Path, old: str, new: str) -> None:
    """The difference between a file and what it should be, on standard output."""
    sys.stdout.writelines(
        difflib.unified_diff(old.splitlines(True), new.splitlines(True), f"{path.name} as it is", f"{path.name} as it should be")
    )


def apply(path: Path, text: str, check: bool) -> bool:
    """Write a file, or with ``check`` only compare.  True where it was as it should be."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    if old == text:
        return True
    if check:
        show(path, old, text)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"update: wrote {path}")
    return False


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", action="append", help="only this platform's lock (or tools); may be given again")
    parser.add_argument("--upgrade", action="store_true", help="newest versions instead of those that the lock has")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 where a file is out of date")
    parser.add_argument("--offline", action="store_true", help="leave the locks alone")
    options = parser.parse_args(argv)
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ROOT))
    table = load_table(root / "arch_config" / "platforms.bzl")
    known = [*table.platforms, "tools"]
    unknown = sorted(set(options.platform or ()) - set(known))
    if unknown:
        parser.error(f"no such platform: {', '.join(unknown)}; there are: {', '.join(known)}")

    current = [apply(path, text, options.check) for path, text in offline_files(root, table)]
    try:
        for name in [] if options.offline else options.platform or known:
            path, text = tools_lock(root, options.upgrade) if name == "tools" else lock_file(root, table, name, options.upgrade)
            current.append(apply(path, text, options.check))
    except ResolveError as error:
        print(f"update: {error}", file=sys.stderr)
        return 2
    for platform in table.platforms.values():
        for line in platform.unverified():
            print(f"update: unverified: {line}")
    return 0 if all(current) or not options.check else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
