"""product_suite: the pytest_suite of a folder of tests that import rtp_llm."""

load("//arch_config:arch_select.bzl", "only_on", "platforms_with")
load("//bazel/pytest:defs.bzl", "pytest_suite")

def product_suite(name = "tests", deps = [], **kwargs):
    """Tests of the product on a CPU: they run in the CPU lanes, on a machine of the lane's CPU, and are skipped
    elsewhere. Files that need a device go to tests/gpu.

    Args:
      name: name of the test_suite.
      deps: beside the product, the fixtures and the test libraries.
      **kwargs: as for pytest_suite.
    """
    pytest_suite(
        name = name,
        target_compatible_with = only_on(platforms_with(accelerator = "none")),
        deps = [
            "//rtp_llm",
            "//tests:conftest",
            "//tests/support",
            "@pip_tools//hypothesis",
        ] + deps,
        **kwargs
    )
