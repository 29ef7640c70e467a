"""MODULE.bazel, WORKSPACE and every .bzl and BUILD file, evaluated without Bazel and held against the table."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from arch_config.table import base_requirements, load_table
from deps.policy import check_coverage, read_files
from tests.bazel.evaluate import Evaluator, Target
from tests.bazel.workspace import WORKSPACE, test_folders

TABLE = load_table()
BASE = base_requirements()

#: Needs Bazel's own repository; its rules are Bazel 4's and nothing of ours.
SHIMS = "bazel/compat/"


def tracked(pattern: str) -> list[str]:
    skip = {".git", ".venv", ".cache", "node_modules", "build", "demo-checkpoints"}
    found = [path.relative_to(WORKSPACE) for path in WORKSPACE.rglob(pattern)]
    return sorted(path.as_posix() for path in found if not skip & set(path.parts) and not path.parts[0].startswith("bazel-"))


@pytest.fixture
def evaluator() -> Evaluator:
    return Evaluator(WORKSPACE)


def selected(value: list[dict[str, dict[str, object]]]) -> dict[str, object]:
    """The branches of a select, by platform."""
    (select,) = value
    assert "//conditions:default" not in select["select"]
    return {label.removeprefix("//arch_config:is_"): branch for label, branch in select["select"].items()}


@pytest.mark.parametrize("path", [path for path in tracked("*.bzl") if not path.startswith(SHIMS)])
def test_bzl_files_evaluate(path: str, evaluator: Evaluator) -> None:
    """Each .bzl is valid in the plainer syntax that Bazel 4 shares with 8 and 9, with its loads."""
    evaluator.bzl(path)


@pytest.mark.parametrize("path", [path for path in tracked("BUILD.bazel") if not path.startswith(SHIMS)])
def test_build_files_evaluate(path: str, evaluator: Evaluator) -> None:
    """Each BUILD file evaluates: macros are given what they take, and selects cover the table."""
    evaluator.build(path)


@pytest.mark.parametrize("urls", [True, False])
def test_whl_deps_are_the_table_s(evaluator: Evaluator, urls: bool) -> None:
    """Starlark's Requires-Dist equals Python's reading of the same table, for every platform."""
    found = selected(evaluator.call("arch_config/arch_select.bzl", f"whl_deps(urls = {urls})"))
    assert {p: sorted(lines) for p, lines in found.items()} == {  # type: ignore[call-overload]
        p.name: p.requires_dist(BASE, urls) for p in TABLE.platforms.values()
    }


@pytest.mark.parametrize("function", ["torch_deps", "flashinfer_deps", "fastsafetensors_deps", "base_deps"])
def test_deps_are_packages_of_the_platform_s_lock(evaluator: Evaluator, function: str) -> None:
    """Every label is in the hub of its own platform, and the lock has the package."""
    locks = {name: {entry.name for entry in read_files(WORKSPACE).lock(name).entries} for name in TABLE.platforms}
    for name, labels in selected(evaluator.call("arch_config/arch_select.bzl", f"{function}()")).items():
        for label in labels:  # type: ignore[attr-defined]
            hub, package = label.split("//")
            assert hub == f"@pip_{name}"
            assert package.replace("_", "-") in locks[name]


def test_linking_and_packaging_choose_the_same_flashinfer(evaluator: Evaluator) -> None:
    """flashinfer_deps() and whl_deps() name the same distributions on every platform."""
    linked = selected(evaluator.call("arch_config/arch_select.bzl", "flashinfer_deps()"))
    packed = selected(evaluator.call("arch_config/arch_select.bzl", "whl_deps()"))
    for name in TABLE.platforms:
        labels = [label.split("//")[1].replace("_", "-") for label in linked[name]]  # type: ignore[attr-defined]
        assert labels == [line.split("==")[0] for line in packed[name] if line.startswith("flashinfer")]  # type: ignore[attr-defined]


def test_only_on_names_every_platform_and_the_host_s_cpu(evaluator: Evaluator) -> None:
    """Chosen platforms need a host of their CPU, the others are incompatible; there is no default branch."""
    found = selected(evaluator.call("arch_config/arch_select.bzl", 'only_on(["cuda13_arm", "cpu"])'))
    assert set(found) == set(TABLE.platforms)
    assert found["cuda13_arm"] == ["@platforms//os:linux", "@platforms//cpu:aarch64"]
    assert found["cpu"] == ["@platforms//os:linux", "@platforms//cpu:x86_64"]
    assert all(found[name] == ["@platforms//:incompatible"] for name in set(found) - {"cuda13_arm", "cpu"})


def test_skipped_targets_depend_on_nothing(evaluator: Evaluator) -> None:
    """run_on() gives its labels on hosts where the target runs, and nothing elsewhere: Bazel 4 would fetch them."""
    (select,) = evaluator.call("arch_config/arch_select.bzl", 'run_on(["cpu"], ["//x"])')
    assert select["select"] == {"//arch_config:runs_cpu": ["//x"], "//conditions:default": []}


def test_unknown_platform_in_only_on_is_an_error(evaluator: Evaluator) -> None:
    """A platform that the table does not have, mistyped in a BUILD file, stops the analysis."""
    with pytest.raises(Exception, match="no such platform"):
        evaluator.call("arch_config/arch_select.bzl", 'only_on(["cuda14"])')


def test_config_settings_and_groups(evaluator: Evaluator) -> None:
    """One setting a platform, one group for each accelerator and CPU, and the flag takes the table's names alone."""
    targets = evaluator.build("arch_config/BUILD.bazel")
    (flag,) = [target for target in targets if target.kind == "string_flag"]
    assert flag.attributes["values"] == ["unset", *sorted(TABLE.platforms)]
    settings = {t.attributes["name"]: t.attributes for t in targets if t.kind == "config_setting"}
    assert set(settings) == {f"{what}_{name}" for what in ("is", "runs") for name in TABLE.platforms}
    for name, attributes in settings.items():
        platform = TABLE.platforms[name.partition("_")[2]]
        assert attributes["flag_values"] == {":platform": platform.name}
        expected = [f"@platforms//os:{platform.os}", f"@platforms//cpu:{platform.cpu}"] if name.startswith("runs_") else None
        assert attributes.get("constraint_values") == expected
    groups = {t.attributes["name"]: set(t.attributes["match_any"]) for t in targets if t.kind == "config_setting_group"}
    for group, matches in groups.items():
        value = group.removeprefix("any_")
        assert matches == {f":is_{p.name}" for p in TABLE.platforms.values() if value in (p.accelerator, p.cpu)}
    assert {"any_cuda", "any_rocm", "any_none", "any_x86_64", "any_aarch64"} == set(groups)


def test_unset_platform_names_the_configs(evaluator: Evaluator) -> None:
    """The error of a build without --config lists every --config."""
    (select,) = evaluator.call("arch_config/arch_select.bzl", "whl_deps()")
    for name in TABLE.platforms:
        assert f"--config={name}" in select["no_match_error"]


def test_module_has_a_hub_and_a_python_for_every_platform(evaluator: Evaluator) -> None:
    """pip.parse by platform, with its lock and Python; the hubs are the ones that WORKSPACE makes; toolchains for all."""
    targets = evaluator.build("MODULE.bazel") + evaluator.build("bazel/pip/hubs.MODULE.bazel")
    assert [t.attributes["label"] for t in targets if t.kind == "include"] == ["//bazel/pip:hubs.MODULE.bazel"]
    hubs = {(t.attributes["hub_name"], t.attributes["python_version"]): t.attributes for t in targets if t.kind == "pip.parse"}
    for platform in TABLE.platforms.values():
        hub = hubs[f"pip_{platform.name}", platform.python]
        assert hub["requirements_lock"] == f"//deps:requirements_lock_{platform.name}.txt"
        assert hub["download_only"] is True
        assert f"--platform=manylinux_2_28_{platform.cpu}" in hub["extra_pip_args"]
        assert f"--python-version={platform.python}" in hub["extra_pip_args"]
        assert ("pip_tools", platform.python) in hubs
    workspace_hubs = evaluator.call("bazel/pip/hubs.bzl", "hubs().keys()")
    (used,) = [t.attributes["repos"] for t in targets if t.kind == "use_repo" and t.attributes["extension"] == "pip"]
    assert sorted(used) == sorted(workspace_hubs) == sorted({hub for hub, _ in hubs})
    pythons = {t.attributes["python_version"]: t.attributes.get("is_default") for t in targets if t.kind == "python.toolchain"}
    assert set(pythons) == {p.python for p in TABLE.platforms.values()}
    assert [python for python, default in pythons.items() if default] == [TABLE.platforms["cpu"].python]
    assert {"rules_python", "bazel_skylib", "platforms"} <= {t.attributes["name"] for t in targets if t.kind == "bazel_dep"}


def test_workspace_maps_every_repository_to_this_machine(evaluator: Evaluator) -> None:
    """WORKSPACE, Bazel 4's, names no URL: Debian's folders and bazel/compat alone."""
    repositories = [t.attributes for t in evaluator.build("WORKSPACE") if t.kind == "local_repository"]
    assert {"bazel_skylib", "platforms", "rules_cc", "rules_python", "remote_coverage_tools"} <= {r["name"] for r in repositories}
    assert all(r["path"].startswith(("/usr/share/bazel/", SHIMS)) for r in repositories)


def test_shims_live_in_compat_alone() -> None:
    """Nothing outside bazel/compat speaks of native Python or C++ rules."""
    shims = re.compile(r"\bnative\.(py|cc)_|__PYTHON_RULES_MIGRATION|py_runtime\(")
    files = [*tracked("*.bzl"), *tracked("BUILD.bazel")]
    assert [path for path in files if not path.startswith(SHIMS) and shims.search((WORKSPACE / path).read_text())] == []


def suites(evaluator: Evaluator) -> dict[str, list[Target]]:
    """Targets of every folder of tests; a folder without a BUILD file has none."""
    return {
        folder: evaluator.build(f"{folder}/BUILD.bazel") if (WORKSPACE / folder / "BUILD.bazel").exists() else []
        for folder in test_folders()
    }


def test_every_test_file_is_in_a_target(evaluator: Evaluator) -> None:
    """Each test_*.py is a source of a pytest_test of its own folder; one that is in none would never run."""
    missing = []
    for folder, targets in suites(evaluator).items():
        run = {source for t in targets if t.kind == "py_test" for source in t.attributes["srcs"]}
        missing += [f"{folder}/{path.name}" for path in sorted((WORKSPACE / folder).glob("test_*.py")) if path.name not in run]
    assert missing == [], "no Bazel target: give the folder a BUILD.bazel with product_suite() or policy_suite()"


def test_test_targets_go_through_pytest(evaluator: Evaluator) -> None:
    """A bare py_test passes without running a test; each target's main is bazel/pytest/main.py."""
    for targets in suites(evaluator).values():
        assert {t.attributes["main"] for t in targets if t.kind == "py_test"} <= {"//bazel/pytest:main.py"}


def test_ci_cpu_lists_every_folder_of_tests(evaluator: Evaluator) -> None:
    """//:ci_cpu is what CI runs: the suite of every folder, each once."""
    (suite,) = [t for t in evaluator.build("BUILD.bazel") if t.attributes.get("name") == "ci_cpu"]
    # //tests is short for //tests:tests.
    listed = [label if ":" in label else f"{label}:{label.rpartition('/')[2]}" for label in suite.attributes["tests"]]
    assert sorted(listed) == sorted(f"//{folder}:tests" for folder in test_folders() if folder != "tests/gpu")


def test_product_tests_say_where_they_run(evaluator: Evaluator) -> None:
    """A test that needs the product's packages carries target_compatible_with; one of the tools alone does not."""
    for targets in suites(evaluator).values():
        for target in targets:
            if target.kind != "py_test":
                continue
            product = "//rtp_llm" in str(target.attributes["deps"])
            bound = bool(target.attributes.get("target_compatible_with"))
            assert bound == product or target.label == "//tests/bazel:test_lanes", target.label


def test_gpu_tests_are_tagged_and_kept_apart(evaluator: Evaluator) -> None:
    """A file that asks for a device by marker stands in a target with that tag, so that no CPU lane runs it."""
    for folder, targets in suites(evaluator).items():
        for target in [t for t in targets if t.kind == "py_test"]:
            for source in [s for s in target.attributes["srcs"] if not s.startswith("//")]:
                text = (WORKSPACE / folder / source).read_text()
                whole_file = re.search(r"^pytestmark = pytest\.mark\.(gpu|multi_gpu)\b", text, re.MULTILINE)
                if whole_file:
                    assert whole_file[1] in target.attributes.get("tags", []), f"{folder}/{source}"


def test_every_platform_has_a_metadata_test(evaluator: Evaluator) -> None:
    """A platform of the table without input, lock, config, hub or wheel metadata test is a problem of the policy."""
    names = {t.attributes["name"] for t in evaluator.build("tests/wheel/BUILD.bazel") if t.kind == "py_test"}
    tested = frozenset(name.removeprefix("test_metadata_") for name in names if name.startswith("test_metadata_"))
    files = dataclasses.replace(read_files(WORKSPACE), metadata_tests=tested)
    assert check_coverage(files) == []


def test_evaluator_refuses_newer_syntax(tmp_path: Path) -> None:
    """The evaluation would find an f-string, a lambda or an annotation, which Bazel 4 does not read."""
    for text in ('X = f"{1}"', "X = lambda: 1", "def f(x: int):\n    pass"):
        (tmp_path / "new.bzl").write_text(text)
        with pytest.raises(Exception, match=r"(?i)f-string|lambda|type|not allowed|parse"):
            Evaluator(tmp_path).bzl("new.bzl")
