"""Runs one test file by pytest with the settings of pyproject.toml, as a Bazel test.

    main.py PYPROJECT [PYTEST ARGUMENT...]

pytest exits 5 when it ran no test, so a file without tests, or with all of them deselected, is a failed target.
"""

from __future__ import annotations

import os
import sys

import pytest


def arguments(pyproject: str, rest: list[str]) -> list[str]:
    """pytest's command line; Bazel's --test_filter and its XML report are passed on."""
    found = ["--disable-plugin-autoload", "-p", "no:cacheprovider", "-c", pyproject, f"--rootdir={os.getcwd()}", *rest]
    if os.environ.get("TESTBRIDGE_TEST_ONLY"):
        found += ["-k", os.environ["TESTBRIDGE_TEST_ONLY"]]
    if os.environ.get("XML_OUTPUT_FILE"):
        found.append(f"--junitxml={os.environ['XML_OUTPUT_FILE']}")
    return found


if __name__ == "__main__":
    sys.exit(int(pytest.main(arguments(sys.argv[1], sys.argv[2:]))))
