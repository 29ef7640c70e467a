"""product_suite and gpu_suite: the pytest_suite of a folder of tests that import rtp_llm."""

load("@rules_python//python:defs.bzl", "py_library")
load("//arch_config:arch_select.bzl", "only_on", "platforms_with", "run_on")
load("//bazel/pytest:defs.bzl", "pytest_suite")

# Helpers that tests of other folders import: hostile checkpoints, loads that come to harm, small models and their transformers twins,
# quantised ones.
_SHARED = [
    "//tests/attacks:helpers",
    "//tests/kernels:helpers",
    "//tests/loader:helpers",
    "//tests/models:helpers",
    "//tests/moe:helpers",
    "//tests/quantization:helpers",
    "//tests/support",
]

def _helpers():
    py_library(
        name = "helpers",
        testonly = True,
        # test files too: some import from one another
        srcs = native.glob(["*.py"]),
        visibility = ["//tests:__subpackages__"],
    )

def _suite(name, platforms, deps, data = [], each = {}, **kwargs):
    own = {}
    for file, arguments in each.items():
        own[file] = dict(arguments)
        for key in ["data", "deps"]:
            if key in arguments:
                own[file][key] = run_on(platforms, arguments[key])
    pytest_suite(
        name = name,
        data = run_on(platforms, data),
        deps = run_on(platforms, [
            ":helpers",
            "//rtp_llm",
            "//tests:conftest",
            "@pip_tools//compressed_tensors",
            "@pip_tools//hypothesis",
            "@pip_tools//matplotlib",
        ] + [d for d in _SHARED if d != "//{}:helpers".format(native.package_name())] + deps),
        each = own,
        target_compatible_with = only_on(platforms),
        **kwargs
    )

def product_suite(name = "tests", data = [], deps = [], **kwargs):
    """Tests of the product on a CPU.

    They run in the CPU lanes, on a machine of the lane's CPU, and are skipped elsewhere. Files that need a device go
    to tests/gpu. Files of the folder that are no tests are their helpers.

    Args:
      name: name of the test_suite.
      data: beside the two small checkpoints and the documentation, files that the tests read.
      deps: beside the product, the fixtures and the test libraries.
      **kwargs: as for pytest_suite.
    """
    _helpers()
    _suite(
        name = name,
        data = [
            "//deps:models.txt",
            # what the code generates or promises is held against the documentation
            "//docs:files",
            "//tools:fetch_models.py",
            "//tools:models",
        ] + data,
        deps = deps,
        # $(rootpath //tools:models), which cannot be asked for where the data is left out
        env = {"RTP_LLM_TEST_MODELS": "tools/models"},
        platforms = platforms_with(accelerator = "none"),
        # 15 minutes: hundreds of processes in the longest file, on a machine that may be busy
        timeout = "long",
        **kwargs
    )

def gpu_suite(name = "tests", tags = ["gpu"], **kwargs):
    """Tests that need a device: out of every lane until --config=gpu or --config=multi_gpu asks for them.

    Args:
      name: name of the test_suite.
      tags: gpu, or multi_gpu for files that need several devices.
      **kwargs: as for pytest_suite.
    """
    _helpers()
    _suite(
        name = name,
        deps = [],
        platforms = platforms_with(accelerator = "cuda") + platforms_with(accelerator = "rocm"),
        tags = ["exclusive"] + tags,
        **kwargs
    )
