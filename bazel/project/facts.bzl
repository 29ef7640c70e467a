"""@project_facts: what other files of the project state once, for BUILD files to load.

VERSION comes from rtp_llm/version.py and REQUIREMENTS from deps/requirements.in; pip, setuptools and Bazel all read
the same two files.
"""

def _impl(rctx):
    version = None
    for line in rctx.read(rctx.attr.version).split("\n"):
        if line.startswith("__version__ = "):
            version = line.split('"')[1]
    if not version:
        fail("{}: no line __version__ = \"...\"".format(rctx.attr.version))
    lines = [line.split("#")[0].strip() for line in rctx.read(rctx.attr.requirements).split("\n")]
    requirements = [line for line in lines if line]
    rctx.file("BUILD.bazel", "")
    rctx.file("facts.bzl", "VERSION = %r\n\nREQUIREMENTS = %r\n" % (version, requirements))

project_facts = repository_rule(
    implementation = _impl,
    attrs = {
        "requirements": attr.label(default = "//deps:requirements.in"),
        "version": attr.label(default = "//rtp_llm:version.py"),
    },
)
