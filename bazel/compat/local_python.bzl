"""The machine's own Python as a toolchain, for Bazel 4 (MODULE.bazel's rules_python brings one).

RTP_PYTHON names the interpreter; without it python<version> and then python3 on PATH are tried. It must be the
version that lane `cpu` locks, since that lane's packages are for it alone.
"""

_PROBE = "import sys, pip; print(sys.executable); print('%d.%d' % sys.version_info[:2])"

_BUILD = """load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

# stub_shebang: the default asks for a program called python, which Debian does not have
py_runtime(name = "py3", interpreter_path = "{exe}", python_version = "PY3", stub_shebang = "#!{exe}")

py_runtime_pair(name = "pair", py3_runtime = ":py3")

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def local_interpreter(rctx, version):
    """Finds a Python that has pip; fails with what to do where there is none.

    Args:
      rctx: of the repository rule that asks.
      version: the minor version, like 3.11.

    Returns:
      its path.
    """
    tried = []
    for name in [rctx.os.environ.get("RTP_PYTHON"), "python" + version, "python3"]:
        path = rctx.which(name) if name and not name.startswith("/") else name
        if not path:
            continue
        result = rctx.execute([path, "-c", _PROBE])
        found = result.stdout.strip().split("\n")
        if result.return_code == 0 and found[1] == version:
            return found[0]
        tried.append("{}: {}".format(path, found[-1] if result.return_code == 0 else result.stderr.strip().split("\n")[-1]))
    fail("no Python {} with pip (tried {}); install one, or name it: RTP_PYTHON=/path/to/python{}".format(
        version,
        "; ".join(tried) or "python3 on PATH",
        version,
    ))

def _impl(rctx):
    # Through a virtual environment, tests do not see what is installed beside the interpreter.
    exe = str(rctx.path("venv/bin/python3"))
    result = rctx.execute([local_interpreter(rctx, rctx.attr.version), "-m", "venv", "--without-pip", "venv"])
    if result.return_code:
        fail("no virtual environment: " + result.stdout + result.stderr)
    rctx.file("BUILD.bazel", _BUILD.format(exe = exe))

local_python = repository_rule(
    implementation = _impl,
    attrs = {"version": attr.string(mandatory = True)},
    environ = ["PATH", "RTP_PYTHON"],
    local = True,
)
