"""pytest_test: a py_test run by pytest. pytest_suite: one for every test file of a folder.

A bare py_test of a file without `if __name__ == "__main__"` passes while it runs nothing; through pytest, a file that
runs zero tests fails.
"""

load("@rules_python//python:defs.bzl", "py_test")

# Both need a device; .bazelrc leaves them out unless --config=gpu or --config=multi_gpu asks for them.
GPU_TAGS = ["gpu", "multi_gpu"]

# What a file's own arguments add to the folder's; selects among them.
_ADDED = ["args", "data", "deps", "tags"]

def pytest_test(name, srcs, args = [], data = [], deps = [], tags = [], **kwargs):
    """One target of test files.

    Args:
      name: target name.
      srcs: test files.
      args: further arguments for pytest.
      data: files that the tests read.
      deps: libraries; pytest itself comes along.
      tags: Bazel's tags. gpu and multi_gpu are pytest's markers too: such a target runs the tests so marked, any
        other target the tests not so marked.
      **kwargs: everything else that py_test takes.
    """
    marked = [tag for tag in tags if tag in GPU_TAGS]
    py_test(
        name = name,
        srcs = ["//bazel/pytest:main.py"] + srcs,
        main = "//bazel/pytest:main.py",
        args = ["$(rootpath //:pyproject.toml)"] + ["$(rootpath {})".format(s) for s in srcs] +
               (["-m", " or ".join(marked)] if marked else []) + args,
        data = ["//:pyproject.toml"] + data,
        deps = deps + ["@pip_tools//pytest"],
        tags = tags,
        **kwargs
    )

def pytest_suite(name, deps, each = {}, exclude = [], **kwargs):
    """A target for every test_*.py of the package's folder, and a test_suite of them all.

    Args:
      name: name of the test_suite.
      deps: libraries for every file.
      each: file name -> further arguments of pytest_test for that file; args, data, deps and tags are added to the
        common ones, others replace them.
      exclude: files that the package makes targets of by itself.
      **kwargs: arguments of pytest_test for every file.
    """
    files = native.glob(["test_*.py"], exclude = exclude)
    unknown = [f for f in each if f not in files]
    if unknown or not files:
        fail("{}: no such test file: {}".format(native.package_name(), unknown or "test_*.py"))
    for file in files:
        own = dict(kwargs)
        own["deps"] = deps
        for key, value in each.get(file, {}).items():
            own[key] = own[key] + value if key in own and key in _ADDED else value
        pytest_test(name = file[:-len(".py")], srcs = [file], **own)
    native.test_suite(name = name, tests = [":" + f[:-len(".py")] for f in files])
