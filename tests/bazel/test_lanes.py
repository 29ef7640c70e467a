"""Bazel itself, on a copy of the tree: lanes are lazy, unknown platforms are refused, empty test files fail.

Bazel runs in Bazel here, with a server and an output folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from arch_config.table import load_table
from tests.bazel.workspace import copy_workspace

pytestmark = pytest.mark.bazel

#: Nobody serves this package, so that reading its line is free and fetching it fails.
UNFETCHABLE = "never-fetched==9.9 \\\n    --hash=sha256:" + "0" * 64 + "\n    # never_fetched-9.9-py3-none-any.whl\n"


@dataclass(frozen=True)
class Bazel:
    """Bazel on a copy of the tree."""

    tree: Path
    output: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # RUNFILES_DIR and the like are the outer test's.
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TEST_", "RUNFILES_", "PYTHON", "BAZEL", "RTP_"))}
        command = [str(self.tree / "tools" / "bazel"), f"--output_user_root={self.output}", *arguments]
        env = {**kept, "HOME": str(self.output), "PATH": os.environ["PATH"]}
        return subprocess.run(command, cwd=self.tree, env=env, capture_output=True, text=True, check=False)

    def fetched(self) -> set[str]:
        """Packages that were fetched for this tree: repositories with a site folder."""
        return {site.parent.name for site in self.output.glob("*/external/pip_*/site")}


@pytest.fixture(scope="module")
def bazel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bazel]:
    """A copy of the tree in which every lock but lane cpu's has a package that cannot be fetched."""
    work = tmp_path_factory.mktemp("bazel")
    tree = copy_workspace(work / "tree")
    for name in load_table().platforms:
        if name != "cpu":
            lock = tree / "deps" / f"requirements_lock_{name}.txt"
            lock.write_text(lock.read_text() + UNFETCHABLE)
    run = Bazel(tree, work / "output")
    try:
        yield run
    finally:
        run("shutdown")
        # Bazel writes its folders read-only; pytest could not remove them.
        subprocess.run(["chmod", "-R", "u+w", str(work)], check=False)


def test_wheel_build_fetches_no_package(bazel: Bazel) -> None:
    """Every platform's wheel builds in one lane without one package being fetched, unfetchable ones in the locks or not."""
    built = bazel("build", "--config=cpu", "//:wheel", *(f"//:wheel_{name}" for name in load_table().platforms))
    assert built.returncode == 0, built.stderr
    assert bazel.fetched() == set()


def test_wheel_is_the_same_from_another_folder(bazel: Bazel) -> None:
    """Byte for byte: built in another folder by another server, the cpu wheel equals the one of the outer build."""
    outer = Path(os.environ["RTP_WHEEL"])
    (inner,) = (bazel.tree / "bazel-bin").resolve().glob(outer.name)
    assert hashlib.sha256(inner.read_bytes()).digest() == hashlib.sha256(outer.read_bytes()).digest()


def test_testing_one_platform_fetches_nothing_of_another(bazel: Bazel) -> None:
    """A test in lane rocm, whose own lock has the unfetchable package, fetches the tools' packages alone."""
    tested = bazel("test", "--config=rocm", "//tests/arch_config:test_table")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert bazel.fetched()
    assert {name for name in bazel.fetched() if not name.startswith("pip_tools_")} == set()


def test_unfetchable_package_fails_where_it_is_needed(bazel: Bazel) -> None:
    """The proof above proves something: the planted package does fail when a target wants it, by name."""
    built = bazel("build", "--config=rocm", "@pip_rocm//never_fetched")
    assert built.returncode != 0
    assert "never-fetched==9.9" in built.stderr


def test_no_platform_fails_in_analysis_and_names_the_configs(bazel: Bazel) -> None:
    """Without --config there is no default: the error lists every platform's."""
    built = bazel("build", "//:wheel")
    assert built.returncode != 0
    assert "no platform chosen" in built.stderr
    assert all(f"--config={name}" in built.stderr for name in load_table().platforms)


def test_unknown_platform_is_refused_with_the_known_ones(bazel: Bazel) -> None:
    """A mistyped platform is an error of the flag, which lists what there is."""
    built = bazel("build", "--//arch_config:platform=cuda14", "//:wheel")
    assert built.returncode != 0
    assert "cuda14" in built.stderr
    assert all(name in built.stderr for name in load_table().platforms)
    assert bazel("build", "--config=cuda14", "//:wheel").returncode != 0


def test_file_without_tests_fails(bazel: Bazel) -> None:
    """Zero tests is a failure: a file of helpers, and one whose tests are all deselected."""
    folder = bazel.tree / "tests" / "empty"
    folder.mkdir()
    (folder / "test_none.py").write_text("def helper() -> None:\n    assert False\n")
    (folder / "test_deselected.py").write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_device() -> None:\n    pass\n")
    (folder / "test_one.py").write_text("def test_one() -> None:\n    pass\n")
    (folder / "BUILD.bazel").write_text('load("//tests:policy.bzl", "policy_suite")\n\npolicy_suite()\n')
    tested = bazel("test", "--config=rocm", "--keep_going", "//tests/empty/...")
    assert tested.returncode == 3, tested.stdout + tested.stderr
    verdicts = {
        line.split()[0]: line.split()[1] for line in (tested.stdout + tested.stderr).splitlines() if line.startswith("//tests/empty")
    }
    assert verdicts == {"//tests/empty:test_none": "FAILED", "//tests/empty:test_deselected": "FAILED", "//tests/empty:test_one": "PASSED"}


def test_what_cannot_run_in_a_lane_is_said_to_be_skipped(bazel: Bazel) -> None:
    """Product tests in ARM lanes on an x86 machine: SKIPPED by name, none passed, and nothing fetched for them."""
    for name in ("cpu_arm", "cuda13_arm"):
        tested = bazel("test", f"--config={name}", "//tests/plan/...", "//tests/arch_config:test_table")
        text = tested.stdout + tested.stderr
        assert tested.returncode == 0, text
        verdicts = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("//tests/plan")}
        assert set(verdicts.values()) == {"SKIPPED"}
    assert {package for package in bazel.fetched() if not package.startswith("pip_tools_")} == set()
