"""policy_suite: the pytest_suite of a folder of tests that import the build's own tools and nothing of the product."""

load("@rules_python//python:defs.bzl", "py_library")
load("//bazel/pytest:defs.bzl", "pytest_suite")

def policy_suite(name = "tests", deps = [], **kwargs):
    """Tests of table, locks, wheels and Bazel files. They need no platform's packages and run in every lane.

    Args:
      name: name of the test_suite.
      deps: beside hypothesis, what the files import.
      **kwargs: as for pytest_suite.
    """
    py_library(
        name = "helpers",
        testonly = True,
        srcs = native.glob(["*.py"], exclude = ["test_*.py"]),
        imports = [".."] if native.package_name() == "tests" else ["../.."],
        visibility = ["//tests:__subpackages__"],
    )
    pytest_suite(
        name = name,
        deps = [
            ":helpers",
            "@pip_tools//hypothesis",
        ] + deps,
        **kwargs
    )
