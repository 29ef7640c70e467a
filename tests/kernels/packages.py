"""Packages that are not as they should be, for the import system to meet for real: sources of a module ``fakeinfer.ops``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import child_env

#: What the import of a native extension has been seen to raise.
IMPORTS = {
    "ImportError": "raise ImportError('libcudart.so.12: cannot open shared object file')",
    "OSError": "import ctypes; ctypes.CDLL('libnot_there.so.7')",
    "RuntimeError": "raise RuntimeError('no driver')",
    "AttributeError": "import os; os.no_such_thing",
    "TypeError": "len(5)",
}

#: Sources of ``fakeinfer/ops.py`` whose ``norm`` cannot be called as ``norm(input=, weight=, eps=)``, and what is said of each.
SIGNATURES = {
    "a keyword less": ("def norm(input, weight): pass", "does not take eps"),
    "another name": ("def norm(x, weight, eps): pass", "does not take input"),
    "by position only": ("def norm(input, weight, eps, /): pass", "does not take input, weight, eps"),
    "anything goes": ("def norm(**kwargs): pass", "does not take input, weight, eps"),
    "one more": ("def norm(input, weight, eps, stream): pass", "asks for stream"),
    "no callable": ("norm = 5", "cannot be called"),
}


def planted(folder: Path, source: str | None, init: str = "") -> Path:
    """``folder`` with a package ``fakeinfer`` in it, ``ops.py`` only where there is a source."""
    package = folder / "fakeinfer"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    if source is not None:
        (package / "ops.py").write_text(source)
    return folder


def child(script: str, *paths: Path, env: dict[str, str] | None = None) -> str:
    """What a fresh interpreter prints that runs ``script`` with ``paths`` in front of its path."""
    full = child_env(env)
    full["PYTHONPATH"] = os.pathsep.join([*map(str, paths), full["PYTHONPATH"]])
    done = subprocess.run([sys.executable, "-c", script], env=full, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
