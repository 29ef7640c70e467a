"""The module extension behind @project_facts; only MODULE.bazel loads this file (Bazel 4 has no extensions)."""

load(":facts.bzl", "project_facts")

def _impl(_module_ctx):
    project_facts(name = "project_facts")

facts = module_extension(implementation = _impl)
