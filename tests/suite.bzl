"""product_suite: the pytest_suite of a folder of tests that import rtp_llm."""

load("@rules_python//python:defs.bzl", "py_library")
load("//arch_config:arch_select.bzl", "only_on", "platforms_with")
load("//bazel/pytest:defs.bzl", "pytest_suite")

def product_suite(name = "tests", data = [], deps = [], **kwargs):
    """Tests of the product on a CPU: they run in the CPU lanes, on a machine of the lane's CPU, and are skipped
    elsewhere. Files that need a device go to tests/gpu. Files of the folder that are no tests are their helpers.

    Args:
      name: name of the test_suite.
      data: beside the two small checkpoints, files that the tests read.
      deps: beside the product, the fixtures and the test libraries.
      **kwargs: as for pytest_suite.
    """
    py_library(
        name = "helpers",
        testonly = True,
        srcs = native.glob(["*.py"], exclude = ["test_*.py"]),
        visibility = ["//tests:__subpackages__"],
    )
    pytest_suite(
        name = name,
        data = ["//tools:models"] + data,
        env = {"RTP_LLM_TEST_MODELS": "$(rootpath //tools:models)"},
        target_compatible_with = only_on(platforms_with(accelerator = "none")),
        deps = [
            ":helpers",
            "//rtp_llm",
            "//tests:conftest",
            "//tests/support",
            "@pip_tools//hypothesis",
        ] + deps,
        **kwargs
    )
