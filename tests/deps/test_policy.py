"""Every lock obeys the policy, and each rule of it finds a fault that was planted for it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from arch_config.table import parse_table
from deps.locks import Entry, Lock, digest, parse_lock, render_lock
from deps.policy import Files, check_all, check_coverage, host_problem, read_files

SHA = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def files() -> Files:
    return read_files()


def test_real_locks_obey_the_policy(files: Files) -> None:
    """Form, sources, files, builds, variants, agreement and coverage of all platforms, and all problems at once."""
    assert len(files.table.platforms) >= 7
    assert check_all(files) == []


def test_what_is_unverified_is_listed(files: Files) -> None:
    """A file without a known hash is in no lock, and table, lock header and input name it; no hash is made up."""
    (companion,) = [c for p in files.table.platforms.values() for c in p.companions if c.sha256 is None]
    assert (companion.name, companion.url) == ("pytorch-triton-rocm", None)
    assert companion.name not in {entry.name for entry in files.lock("rocm").entries}
    for text in (files.locks["rocm"], files.inputs["rocm"]):
        assert "pytorch-triton-rocm 3.5.1: no known URL and sha256" in text


def rewritten(files: Files, name: str, change: Callable[[list[Entry]], list[Entry]]) -> Files:
    """A lock with other entries, and digests as if the updater had written it: only the rule itself can find it."""
    platform = files.table.platforms[name]
    text = render_lock(platform, files.base, change(list(files.lock(name).entries)))
    return dataclasses.replace(files, locks={**files.locks, name: text})


def edited(files: Files, name: str, pattern: str, replacement: str) -> Files:
    """A lock's text with one substitution in its body, and the body's digest made to fit."""
    text, count = re.subn(pattern, replacement, files.locks[name], count=1, flags=re.MULTILINE)
    assert count == 1
    lock = parse_lock(text)
    text = text.replace(f"# body sha256: {lock.body_digest}", f"# body sha256: {lock.actual_body_digest}")
    return dataclasses.replace(files, locks={**files.locks, name: text})


def replacing(package: str, **fields: object) -> Callable[[list[Entry]], list[Entry]]:
    return lambda entries: [dataclasses.replace(e, **fields) if e.name == package else e for e in entries]  # type: ignore[arg-type]


def adding(*names: str, version: str = "1.0") -> Callable[[list[Entry]], list[Entry]]:
    """Entries for wheels of these file names, with hashes of their own."""
    new = [Entry(n.split("-")[0].replace("_", "-"), (), n.split("-")[1], None, digest(n), n) for n in names]
    return lambda entries: entries + new


def table_with(files: Files, old: str, new: str) -> Files:
    from arch_config.table import TABLE

    text = TABLE.read_text()
    assert old in text
    return dataclasses.replace(files, table=parse_table(text.replace(old, new)))


BINDINGS = "cuda_bindings-13.0.3-cp312-cp312-manylinux_2_28_x86_64.whl"
ROCM_URL = "https://download-r2.pytorch.org/whl/rocm6.4/torch-2.9.1%2Brocm6.4-cp312-cp312-manylinux_2_28_x86_64.whl"


def exchanging(package: str, other: Lock) -> Callable[[list[Entry]], list[Entry]]:
    """The same package as another platform's lock has it."""
    (theirs,) = [entry for entry in other.entries if entry.name == package]
    return lambda entries: [theirs if entry.name == package else entry for entry in entries]


FAULTS: dict[str, tuple[Callable[[Files], Files], str]] = {
    "missing hash": (
        lambda f: edited(f, "cpu", r"^    --hash=sha256:[0-9a-f]{64}\n", ""),
        r"cpu: annotated-doc: expected one sha256, found 0",
    ),
    "hash of another algorithm": (
        lambda f: edited(f, "cpu", r"--hash=sha256:[0-9a-f]{64}", "--hash=md5:d41d8cd98f00b204e9800998ecf8427e"),
        r"cpu: annotated-doc: expected one sha256, found 0",
    ),
    "plain http": (
        lambda f: rewritten(f, "rocm", replacing("torch", url=ROCM_URL.replace("https:", "http:"))),
        r"rocm: torch: scheme http, expected https",
    ),
    "internal host": (
        lambda f: rewritten(f, "rocm", replacing("torch", url=ROCM_URL.replace("download-r2.pytorch.org", "wheels.corp"))),
        r"rocm: torch: host wheels\.corp is an internal one",
    ),
    "address instead of a host": (
        lambda f: rewritten(f, "rocm", replacing("torch", url=ROCM_URL.replace("download-r2.pytorch.org", "10.0.0.7"))),
        r"rocm: torch: host 10\.0\.0\.7 is an address",
    ),
    "URL that the table does not name": (
        lambda f: rewritten(f, "cpu", replacing("click", url="https://wheels.example.org/click-8.5.1-py3-none-any.whl")),
        r"cpu: click: a URL that the table does not name",
    ),
    "index line": (
        lambda f: edited(f, "cpu", r"^annotated-doc", "--extra-index-url https://wheels.example.org/simple\nannotated-doc"),
        r"cpu: --extra-index-url .*: option lines .* do not belong",
    ),
    "two variants with one hash": (
        lambda f: rewritten(f, "cuda12_9", replacing("torch", sha256=f.table.platforms["rocm"].torch.sha256)),
        r"one sha256 43471c9e\S+ for two files: torch-2\.13\.0\+cu129\S+ \(cuda12_9\); torch-2\.9\.1\+rocm6\.4\S+ \(rocm\)",
    ),
    "extension for another torch": (
        lambda f: rewritten(f, "cuda12_9", adding("causal_conv1d-1.5.0+torch2.1.2.cu129-cp312-cp312-linux_x86_64.whl")),
        r"cuda12_9: causal_conv1d\S+: built for torch 2\.1\.2, the platform has 2\.13\.0\+cu129",
    ),
    "extension for another CUDA": (
        lambda f: rewritten(f, "cuda12_9", adding("causal_conv1d-1.5.0+torch2.13.cu121-cp312-cp312-linux_x86_64.whl")),
        r"cuda12_9: causal_conv1d\S+: built for CUDA 121, the platform has 12\.9",
    ),
    "CUDA package on another major": (
        lambda f: rewritten(f, "cuda13", adding("nvidia_cublas_cu12-12.9.1.4-py3-none-manylinux_2_27_x86_64.whl")),
        r"cuda13: nvidia_cublas_cu12\S+: built for CUDA 12, the platform has 13\.0",
    ),
    "CUDA package without CUDA": (
        lambda f: rewritten(f, "cpu", adding("nvidia_cublas_cu12-12.9.1.4-py3-none-manylinux_2_27_x86_64.whl")),
        r"cpu: nvidia_cublas_cu12\S+: built for CUDA 12, the platform has no CUDA",
    ),
    "toolkit package of another major": (
        lambda f: rewritten(f, "cuda12_9", replacing("cuda-bindings", version="13.0.3", file_name=BINDINGS)),
        r"cuda12_9: cuda_bindings\S+: belongs to CUDA 13, the platform has 12\.9",
    ),
    "x86 file in an ARM lock": (
        lambda f: rewritten(f, "cuda13_arm", exchanging("numpy", f.lock("cuda13"))),
        r"cuda13_arm: numpy\S+x86_64\.whl: not for Python 3\.12 on aarch64",
    ),
    "ARM file in an x86 lock": (
        lambda f: rewritten(f, "cuda13", exchanging("numpy", f.lock("cuda13_arm"))),
        r"cuda13: numpy\S+aarch64\.whl: not for Python 3\.12 on x86_64",
    ),
    "file for another Python": (
        lambda f: rewritten(f, "cpu", exchanging("numpy", f.lock("cuda13"))),
        r"cpu: numpy\S+cp312\S+: not for Python 3\.11 on x86_64",
    ),
    "file of another version": (
        lambda f: rewritten(f, "cpu", replacing("click", version="8.1.0")),
        r"cpu: click 8\.1\.0: its file is click-8\.5\.1",
    ),
    "package twice": (
        lambda f: rewritten(f, "cpu", lambda entries: [*entries, next(e for e in entries if e.name == "click")]),
        r"cpu: click is there twice",
    ),
    "edited by hand": (
        lambda f: dataclasses.replace(f, locks={**f.locks, "cpu": f.locks["cpu"].replace("click==8.5.1", "click==8.5.0")}),
        r"cpu: edited by hand",
    ),
    "line deleted by hand": (
        lambda f: dataclasses.replace(f, locks={**f.locks, "cpu": re.sub(r"^click==.*\n.*\n.*\n", "", f.locks["cpu"], flags=re.MULTILINE)}),
        r"cpu: edited by hand",
    ),
    "required package missing": (
        lambda f: rewritten(f, "cpu", lambda entries: [e for e in entries if e.name != "rich"]),
        r"cpu: rich is required and not in the lock",
    ),
    "version outside the range": (
        lambda f: rewritten(f, "cpu", replacing("rich", version="12.0", file_name="rich-12.0-py3-none-any.whl")),
        r"cpu: rich 12\.0, required is rich<16,>=13",
    ),
    "requirements.in changed": (
        lambda f: dataclasses.replace(f, base=[*f.base, "einops>=0.8"]),
        r"cpu: the table or requirements\.in changed since it was made",
    ),
    "torch bumped in the table alone": (
        lambda f: table_with(f, '"version": "2.9.1+rocm6.4"', '"version": "2.9.2+rocm6.4"'),
        r"rocm: torch 2\.9\.1\+rocm6\.4 from \S+, the table has 2\.9\.2\+rocm6\.4",
    ),
    "index torch bumped in the table alone": (
        lambda f: table_with(f, '"version": "2.13.0",', '"version": "2.14.0",'),
        r"cuda13: torch 2\.13\.0 from the index, the table has 2\.14\.0 from the index",
    ),
    "hash changed in the table alone": (
        lambda f: table_with(f, "43471c9e4520402b5feeebd6c6d180e8bf2314402925798fe219c32fecd1ef95", SHA),
        r"rocm: torch: sha256 43471c9e\S+, the table says 0123",
    ),
    "input edited by hand": (
        lambda f: dataclasses.replace(f, inputs={**f.inputs, "cpu": f.inputs["cpu"] + "einops\n"}),
        r"requirements_cpu\.in is not what the table gives",
    ),
    "flashinfer that the table does not have": (
        lambda f: rewritten(f, "cpu", adding("flashinfer_python-0.6.6-py3-none-any.whl")),
        r"cpu: flashinfer-python 0\.6\.6 is in the lock, the table has none",
    ),
    "platform without a lock": (
        lambda f: dataclasses.replace(f, locks={n: t for n, t in f.locks.items() if n != "cuda13"}),
        r"cuda13: no lock",
    ),
    "platform without an input": (
        lambda f: dataclasses.replace(f, inputs={n: t for n, t in f.inputs.items() if n != "cuda13"}),
        r"cuda13: no input",
    ),
    "platform without a config": (
        lambda f: dataclasses.replace(f, bazelrc=f.bazelrc.replace("build:cuda13 --//arch_config:platform=cuda13\n", "")),
        r"platforms\.bazelrc is not what the table gives",
    ),
    "config repeated": (
        lambda f: dataclasses.replace(f, bazelrc=f.bazelrc + "build:cuda13 --//arch_config:platform=cuda12_9\n"),
        r"platforms\.bazelrc is not what the table gives",
    ),
    "platform without a hub": (
        lambda f: dataclasses.replace(f, module_hubs=f.module_hubs.replace("pip_cuda13_arm", "pip_other")),
        r"hubs\.MODULE\.bazel is not what the table gives",
    ),
    "platform without a metadata test": (
        lambda f: dataclasses.replace(f, metadata_tests=frozenset(f.table.platforms) - {"rocm"}),
        r"rocm: no wheel metadata test",
    ),
    "lock of no platform": (
        lambda f: dataclasses.replace(f, locks={**f.locks, "cuda11": f.locks["cuda13"]}),
        r"cuda11: a lock of a platform that the table does not have",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(files: Files, fault: str) -> None:
    """The rule reports the fault with the platform and the file or package, and what was expected."""
    plant, expected = FAULTS[fault]
    problems = check_all(plant(files))
    assert any(re.search(expected, problem) for problem in problems), problems


def test_all_problems_are_listed_at_once(files: Files) -> None:
    """Two faults in two locks are two problems of one run."""
    broken = rewritten(files, "rocm", replacing("torch", url=ROCM_URL.replace("https:", "http:")))
    broken = rewritten(broken, "cpu", replacing("click", version="8.1.0"))
    problems = check_all(broken)
    assert any("rocm: torch: scheme http" in problem for problem in problems)
    assert any("cpu: click 8.1.0" in problem for problem in problems)


@pytest.mark.parametrize(
    ("url", "public"),
    [
        ("https://download.pytorch.org/whl/x.whl", True),
        ("http://download.pytorch.org/whl/x.whl", False),
        ("https://wheels/x.whl", False),
        ("https://127.0.0.1/x.whl", False),
        ("https://[::1]/x.whl", False),
        ("https://pypi.internal/x.whl", False),
        ("https://artifacts.internal.company.com/x.whl", False),
        ("https://user:secret@download.pytorch.org/x.whl", False),
        ("file:///tmp/x.whl", False),
    ],
)
def test_public_hosts(url: str, public: bool) -> None:
    """Only https and a public host name, without credentials."""
    assert (host_problem(url) is None) is public


def test_coverage_needs_no_lock_contents(files: Files) -> None:
    """A missing lock is reported by name instead of as an error of another check."""
    assert check_coverage(dataclasses.replace(files, locks={})) == [
        f"{name}: no lock: bazel run //deps:update" for name in sorted(files.table.platforms)
    ]
