"""The platform table is well formed, and a row that is not is refused with every problem at once."""

from __future__ import annotations

import pytest

from arch_config.table import ROOT, TABLE, TableError, base_requirements, load_table, parse_table
from deps.generated import bazelrc, docs_table, with_table

TEXT = TABLE.read_text()

#: The platforms that the project promises; a release without one of them is broken.
PROMISED = {"cuda12_9", "cuda12_9_arm", "cuda13", "cuda13_arm", "rocm", "cpu", "cpu_arm"}


def test_promised_platforms_are_there() -> None:
    """The seven platforms, each with its CPU, accelerator, toolkit and local version."""
    found = {p.name: (p.cpu, p.accelerator, p.toolkit, p.local_version) for p in load_table().platforms.values()}
    assert set(found) >= PROMISED
    assert found["cuda12_9"] == ("x86_64", "cuda", "12.9", "cu129")
    assert found["cuda12_9_arm"] == ("aarch64", "cuda", "12.9", "cu129")
    assert found["cuda13"] == ("x86_64", "cuda", "13.0", "cu130")
    assert found["cuda13_arm"] == ("aarch64", "cuda", "13.0", "cu130")
    assert found["rocm"] == ("x86_64", "rocm", "6.4", "rocm6.4")
    assert found["cpu"] == ("x86_64", "none", "", "cpu")
    assert found["cpu_arm"] == ("aarch64", "none", "", "cpu")


def test_local_version_is_torchs() -> None:
    """A wheel's local version is the label of the torch build that it needs, where torch's file carries one."""
    for platform in load_table().platforms.values():
        label = platform.torch.version.partition("+")[2]
        assert label in ("", platform.local_version), platform.name


def test_torch_satisfies_the_project_s_own_range() -> None:
    """Each row's torch is within the range of requirements.in."""
    from packaging.requirements import Requirement

    (wanted,) = [Requirement(line) for line in base_requirements() if Requirement(line).name == "torch"]
    for platform in load_table().platforms.values():
        assert wanted.specifier.contains(platform.torch.version), platform.name


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('"cpu": "x86_64"', '"cpu": "riscv64"', r"cuda12_9: cpu riscv64: one of"),
        ('"accelerator": "rocm"', '"accelerator": "rocmm"', r"rocm: accelerator rocmm"),
        ('"toolkit": "6.4",', "", r"rocm: no field toolkit"),
        ('"toolkit": "6.4",', '"toolkit": "6.4", "toolkits": "",', r"rocm: unknown field toolkits"),
        ("37780eb8", "xyz80eb8", r"cuda12_9_arm: sha256 xyz80eb8\S+: 64 hexadecimal digits"),
        ('"python": "3.10"', '"python": "3.11"', r"cuda12_9_arm: wheel_tag cp310\S+: not for Python 3\.11"),
        ("cp310-none-manylinux_2_28_aarch64", "cp310-none-manylinux_2_28_x86_64", r"cuda12_9_arm: wheel_tag \S+: not for aarch64"),
        ('"variant": "cubin"', '"variant": "cubins"', r"cuda13: flashinfer\.variant cubins"),
        ('"requires_known": "read"', '"requires_known": "guessed"', r"cpu: torch\.requires_known guessed"),
        ("BOTH_CUDA_MAJORS = [", "BOTH_CUDA_MAJORS = [] + [", r"BOTH_CUDA_MAJORS is not a plain literal"),
        ("PLATFORMS = {", "def f():\n    pass\n\nPLATFORMS = {", r"expected NAME = literal"),
    ],
)
def test_malformed_table_is_refused(old: str, new: str, expected: str) -> None:
    """The message names row and field, has the value found and says what is allowed."""
    assert old in TEXT
    with pytest.raises(TableError, match=expected):
        parse_table(TEXT.replace(old, new))


def test_all_problems_of_a_table_are_listed_at_once() -> None:
    """Two bad rows are two lines of one error."""
    broken = TEXT.replace('"accelerator": "rocm"', '"accelerator": "rocmm"').replace('"variant": "cubin"', '"variant": "x"')
    with pytest.raises(TableError, match=r"cuda13: flashinfer[\s\S]*rocm: accelerator"):
        parse_table(broken)


def test_one_row_is_enough_for_a_platform() -> None:
    """A new row gives its config, input, wheel name, requirements and docs line; nothing else has to be written."""
    row = TEXT.index('    "cpu_arm": {')
    copy = TEXT[row : TEXT.rindex("}")].replace('"cpu_arm"', '"cpu_next"').replace('"local_version": "cpu"', '"local_version": "cpunext"')
    table = parse_table(TEXT[: TEXT.rindex("}")] + copy + "}\n")
    platform = table.platforms["cpu_next"]
    assert "build:cpu_next --//arch_config:platform=cpu_next\n" in bazelrc(table)
    assert "| `cpu_next` | aarch64 |" in docs_table(table)
    assert platform.wheel_name("rtp-llm", "1.0") == "rtp_llm-1.0+cpunext-cp311-none-manylinux_2_28_aarch64.whl"
    assert any(line.startswith("torch @ https://") for line in platform.requires_dist(base_requirements()))


def test_documentation_has_the_table() -> None:
    """docs/packaging.md shows the platforms, and what is unverified, as the table has them now."""
    page = (ROOT / "docs" / "packaging.md").read_text()
    assert with_table(page, docs_table(load_table())) == page, "bazel run //deps:update"


def test_documentation_without_its_marks_is_an_error() -> None:
    """A page whose marks were lost is not silently left without the table."""
    with pytest.raises(ValueError, match="expected one"):
        with_table("no marks", "table")
