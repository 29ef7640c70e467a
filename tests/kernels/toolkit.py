"""A CUDA toolkit that compiles nothing, and notes what it is asked to: what cannot be had without one.  Ninja, flashinfer's
build files, its locks and its loading are the real ones.

Its linker gives a library of Python's world with the name of a run-time library of CUDA behind its end, which is how
:func:`rtp_llm.kernels.compile.cuda_major` tells what a module was linked against.
"""

from __future__ import annotations

import os
from pathlib import Path

import markupsafe._speedups
import ninja

_NVCC = """#!/bin/sh
[ "$1" = --version ] && echo "release {version}, V{version}.0" && exit 0
echo compiled >> {log}
[ -e {refusal} ] && echo "error: no such register" && exit 1
while [ "$1" != -c ]; do shift; done
: > "$4"; echo "$4: $2" > "$4.d"
"""

_CXX = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
cat {library} > "$2"
printf 'libcudart.so.{major}\\0' >> "$2"
"""

#: Where ninja is: with the interpreter's programs, or beside its package, where ``pip install --target`` puts it.
_NINJA = [folder for folder in (ninja.BIN_DIR, str(Path(ninja.__file__).parents[1] / "bin")) if folder]


class Toolkit:
    """A toolkit below ``folder``; ``env`` makes a child process find it, and gives it a GPU's name and a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log, self.refusal = folder / "log", folder / "refusal"
        self.env = {
            "CUDA_HOME": str(folder / "cuda"),
            "CXX": str(folder / "cuda" / "bin" / "c++"),
            "FLASHINFER_WORKSPACE_BASE": str(folder / "cache"),
            "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
            "FLASHINFER_LOGGING_LEVEL": "error",
            "PATH": os.pathsep.join([*_NINJA, os.environ["PATH"]]),
        }
        self.install("13.0")

    def install(self, version: str) -> None:
        """Puts the compiler of another CUDA there."""
        programs = self.folder / "cuda" / "bin"
        programs.mkdir(parents=True, exist_ok=True)
        library = markupsafe._speedups.__file__
        nvcc = _NVCC.format(version=version, log=self.log, refusal=self.refusal)
        cxx = _CXX.format(library=library, major=version.partition(".")[0])
        for name, text in (("nvcc", nvcc), ("c++", cxx)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)

    @property
    def cached(self) -> Path:
        """Where flashinfer keeps its modules."""
        return next((self.folder / "cache").glob(".cache/flashinfer/*/90a/cached_ops"))

    @property
    def compiled(self) -> int:
        """Files that were compiled so far."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0
