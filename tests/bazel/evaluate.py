"""Evaluates .bzl, BUILD and MODULE.bazel files without Bazel, and records what they declare.

Bazel's own functions are stand-ins: a rule called records its name and attributes, a select is a list of one dict, and
loads from other repositories give stand-ins too. The dialect is Bazel 4's: no lambda, f-string or annotation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import starlark as sl

from arch_config.table import ROOT, base_requirements

#: Rules and macros of other repositories: (repository, file) -> the names that are recorded as targets when called.
RULES = ("py_library", "py_binary", "py_test", "string_flag", "config_setting", "filegroup", "test_suite", "alias", "genrule")

PRELUDE = """
def _ignore(*args, **kwargs):
    return None

def _attr(*args, **kwargs):
    return struct(default = kwargs.get("default"))

attr = struct(
    bool = _attr, int = _attr, label = _attr, label_list = _attr, label_keyed_string_dict = _attr, output = _attr,
    string = _attr, string_dict = _attr, string_list = _attr,
)

def select(values, no_match_error = ""):
    return [{"select": values, "no_match_error": no_match_error}]

def Label(text):
    return text

def depset(direct = [], transitive = []):
    return direct

def _called(kind):
    def call(*args, **kwargs):
        record(kind, kwargs)
    return call

def rule(**kwargs):
    return _called("rule")

def repository_rule(**kwargs):
    return _called("repository_rule")

def transition(**kwargs):
    return struct(**kwargs)

def module_extension(**kwargs):
    return struct(**kwargs)

def provider(**kwargs):
    return _ignore

def _glob(include, exclude = [], allow_empty = True):
    return glob_files(include, exclude)

def _package_name():
    return this_package()

native = struct(
    glob = _glob,
    package_name = _package_name,
    %(native)s
)

glob = _glob
DefaultInfo = _ignore
PyInfo = _ignore
package = _ignore
exports_files = _ignore
licenses = _ignore
register_toolchains = _ignore
workspace = _ignore

def local_repository(**kwargs):
    record("local_repository", kwargs)

%(rules)s

def module(**kwargs):
    record("module", kwargs)

def bazel_dep(**kwargs):
    record("bazel_dep", kwargs)

def use_extension(file, name):
    def parse(**kwargs):
        record(name + ".parse", kwargs)
    def toolchain(**kwargs):
        record(name + ".toolchain", kwargs)
    return struct(name = name, file = file, parse = parse, toolchain = toolchain)

def use_repo(extension, *args, **kwargs):
    record("use_repo", {"extension": extension.name, "repos": list(args)})

def include(label):
    record("include", {"label": label})
"""

PRELUDE %= {
    "native": ", ".join(f'{name} = _called("{name}")' for name in RULES),
    "rules": "\n".join(f'{name} = _called("{name}")' for name in ("test_suite", "filegroup", "alias", "genrule", "config_setting")),
}

#: What loads from other repositories give.
FOREIGN = """
def _called(kind):
    def call(*args, **kwargs):
        record(kind, kwargs)
    return call

py_library = _called("py_library")
py_binary = _called("py_binary")
py_test = _called("py_test")
string_flag = _called("string_flag")
PyInfo = "PyInfo"

def _group(**kwargs):
    record("config_setting_group", kwargs)

selects = struct(config_setting_group = _group)

def install_pip_hubs():
    record("install_pip_hubs", {})
"""


@dataclass(frozen=True)
class Target:
    """One call of a rule: its kind, the package it stands in, and its attributes."""

    kind: str
    package: str
    attributes: dict[str, Any]

    @property
    def label(self) -> str:
        return f"//{self.package}:{self.attributes.get('name')}"


@dataclass
class Evaluator:
    """Evaluates files of one tree; loaded files are evaluated once."""

    root: Path = ROOT
    targets: list[Target] = field(default_factory=list)
    package: str = ""
    _loaded: dict[str, sl.FrozenModule] = field(default_factory=dict)

    def _record(self, kind: str, attributes: dict[str, Any]) -> None:
        self.targets.append(Target(kind, self.package, attributes))

    def _glob(self, include: list[str], exclude: list[str]) -> list[str]:
        base = self.root / self.package
        found = {path.relative_to(base).as_posix() for pattern in include for path in base.glob(pattern) if path.is_file()}
        left_out = {path.relative_to(base).as_posix() for pattern in exclude for path in base.glob(pattern)}
        # A folder with a BUILD file is another package.
        packages = {path.parent.relative_to(base).as_posix() for path in base.glob("*/**/BUILD.bazel")}
        return sorted(name for name in found - left_out if not any(name.startswith(f"{package}/") for package in packages))

    def _globals(self) -> sl.Globals:
        return sl.Globals.extended_by([sl.LibraryExtension.StructType])

    def _module(self) -> sl.Module:
        module = sl.Module()
        module.add_callable("record", self._record)
        module.add_callable("glob_files", self._glob)
        module.add_callable("this_package", lambda: self.package)
        module.add_callable("fail", _fail)
        return module

    def _dialect(self, everything: bool) -> sl.Dialect:
        dialect = sl.Dialect.extended() if everything else sl.Dialect.standard()
        dialect.enable_top_level_stmt = True
        dialect.enable_keyword_only_arguments = everything
        dialect.enable_load_reexport = True
        dialect.enable_lambda = everything
        dialect.enable_f_strings = everything
        dialect.enable_types = sl.DialectTypes.ENABLE if everything else sl.DialectTypes.DISABLE
        return dialect

    def _load(self, label: str, package: str) -> sl.FrozenModule:
        if label.startswith("@project_facts//"):
            # project_facts as it would be written for this tree.
            text = f"VERSION = '1.2.3'\nREQUIREMENTS = {base_requirements(self.root / 'deps' / 'requirements.in')!r}\n"
            return self._freeze(label, text, package)
        if label.startswith("@"):
            return self._freeze(label, FOREIGN, package)
        where, _, name = label.partition(":")
        folder = where.removeprefix("//") if where.startswith("//") else package
        return self.bzl(f"{folder}/{name}" if folder else name)

    def _freeze(self, label: str, text: str, package: str) -> sl.FrozenModule:
        if label not in self._loaded:
            module = self._module()
            sl.eval(module, sl.parse(label, text, self._dialect(everything=True)), self._globals())
            self._loaded[label] = module.freeze()
        return self._loaded[label]

    def _run(self, path: str, text: str, package: str) -> sl.Module:
        module = self._module()
        sl.eval(module, sl.parse("prelude", PRELUDE, self._dialect(everything=True)), self._globals())
        loader = sl.FileLoader(lambda label: self._load(label, package))
        # starlark-pyo3 has no docstring for load(); Bazel's BUILD files may load after the first statement, as here.
        sl.eval(module, sl.parse(path, text, self._dialect(everything=False)), self._globals(), loader)
        return module

    def bzl(self, path: str) -> sl.FrozenModule:
        """A .bzl file, by its path from the root."""
        if path not in self._loaded:
            self._loaded[path] = self._run(path, (self.root / path).read_text(), str(Path(path).parent)).freeze()
        return self._loaded[path]

    def build(self, path: str) -> list[Target]:
        """A BUILD, WORKSPACE or MODULE.bazel file: what it declares."""
        before, outer = len(self.targets), self.package
        self.package = "" if str(Path(path).parent) == "." else str(Path(path).parent)
        try:
            self._run(path, (self.root / path).read_text(), self.package)
        finally:
            self.package = outer
        return self.targets[before:]

    def call(self, path: str, expression: str) -> Any:
        """The value of an expression that begins with a name of a .bzl file."""
        name = re.match(r"\w+", expression)
        assert name, expression
        loads = f'load("//{Path(path).parent}:{Path(path).name}", "{name[0]}")\n'
        module = self._module()
        loader = sl.FileLoader(lambda label: self._load(label, ""))
        return sl.eval(module, sl.parse("expression", loads + expression, self._dialect(everything=True)), self._globals(), loader)


def _fail(*words: Any) -> None:
    raise ValueError(" ".join(map(str, words)))
