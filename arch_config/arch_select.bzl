"""What BUILD files ask about the platform. Everything here is derived from platforms.bzl; no select has a default.

The platform is one string_flag, set by --config=<platform>. A build without one fails in analysis, and the message
lists the configs.
"""

load("@bazel_skylib//lib:selects.bzl", "selects")
load("@project_facts//:facts.bzl", "REQUIREMENTS")
load(":platforms.bzl", "FLASHINFER_VARIANTS", "PLATFORMS")

ALL_PLATFORMS = sorted(PLATFORMS.keys())

_CHOOSE = "no platform chosen: add one of " + ", ".join(["--config=" + p for p in ALL_PLATFORMS])

def platform_select(values):
    """A select over the platforms.

    Args:
      values: platform -> value, for every platform of the table.

    Returns:
      a select without a default branch.
    """
    if sorted(values.keys()) != ALL_PLATFORMS:
        fail("platform_select needs a value for each of {}, got {}".format(ALL_PLATFORMS, sorted(values.keys())))
    return select({"//arch_config:is_" + p: values[p] for p in ALL_PLATFORMS}, no_match_error = _CHOOSE)

def table_select(field):
    """A select of one field of the table."""
    return platform_select({p: PLATFORMS[p][field] for p in ALL_PLATFORMS})

def _hub_label(platform, distribution):
    return "@pip_{}//{}".format(platform, distribution.lower().replace("-", "_").replace(".", "_"))

def requirement(distribution):
    """The platform's own build of a distribution that every platform's lock has, as a list of one label."""
    return platform_select({p: [_hub_label(p, distribution)] for p in ALL_PLATFORMS})

def _base(platform):
    """Lines of deps/requirements.in that the table does not pin."""
    exact = ["torch"] + _flashinfer(platform) + (["fastsafetensors"] if PLATFORMS[platform]["fastsafetensors"] else [])
    return [r for r in REQUIREMENTS if _distribution(r) not in exact]

def base_deps():
    """What deps/requirements.in names beside what the table pins, from the platform's lock."""
    return platform_select({p: [_hub_label(p, _distribution(r)) for r in _base(p)] for p in ALL_PLATFORMS})

def torch_deps():
    """The platform's torch and whatever files go with it."""
    return platform_select({
        p: [_hub_label(p, "torch")] + [_hub_label(p, c["name"]) for c in PLATFORMS[p]["companions"] if c["sha256"]]
        for p in ALL_PLATFORMS
    })

def _flashinfer(platform):
    return FLASHINFER_VARIANTS[PLATFORMS[platform]["flashinfer"]["variant"]]

def flashinfer_deps():
    """The platform's flashinfer distributions; none where the table says none."""
    return platform_select({p: [_hub_label(p, d) for d in _flashinfer(p)] for p in ALL_PLATFORMS})

def fastsafetensors_deps():
    """The platform's fastsafetensors; none where the table says none."""
    return platform_select({
        p: [_hub_label(p, "fastsafetensors")] if PLATFORMS[p]["fastsafetensors"] else []
        for p in ALL_PLATFORMS
    })

def _torch_requirement(platform, urls):
    torch = PLATFORMS[platform]["torch"]
    if urls and torch["url"]:
        return "torch @ {}#sha256={}".format(torch["url"], torch["sha256"])
    return "torch==" + torch["version"]

def _whl_deps(platform, urls):
    row = PLATFORMS[platform]
    deps = _base(platform)
    deps.append(_torch_requirement(platform, urls))
    for companion in row["companions"]:
        if urls and companion["sha256"]:
            deps.append("{} @ {}#sha256={}".format(companion["name"], companion["url"], companion["sha256"]))
    deps += ["{}=={}".format(d, row["flashinfer"]["version"]) for d in _flashinfer(platform)]
    if row["fastsafetensors"]:
        deps.append("fastsafetensors==" + row["fastsafetensors"])
    return deps

def _distribution(requirement_line):
    end = len(requirement_line)
    for i in range(len(requirement_line)):
        if requirement_line[i] in " <>=!~;[@(":
            end = i
            break
    return requirement_line[:end]

def whl_deps(urls = True):
    """Requires-Dist of the platform's wheel, as a select of lists of strings.

    Args:
      urls: whether a file that no public index serves is named by its URL and hash. Some indexes refuse wheels that
        do so; for these the version with its local label is named, and an extra index must serve it.

    Returns:
      a select of lists of strings.
    """
    return platform_select({p: _whl_deps(p, urls) for p in ALL_PLATFORMS})

def _host_constraints(platform):
    return ["@platforms//os:" + PLATFORMS[platform]["os"], "@platforms//cpu:" + PLATFORMS[platform]["cpu"]]

def only_on(platforms):
    """target_compatible_with: skip everywhere but on these platforms, and where the host's CPU is another one.

    Args:
      platforms: names of the table.

    Returns:
      a select of lists of constraints.
    """
    unknown = [p for p in platforms if p not in PLATFORMS]
    if unknown:
        fail("only_on: no such platform {}; the table has {}".format(unknown, ALL_PLATFORMS))
    return platform_select({
        p: _host_constraints(p) if p in platforms else ["@platforms//:incompatible"]
        for p in ALL_PLATFORMS
    })

def run_on(platforms, labels):
    """What a target with only_on(platforms) depends on, where it runs, and nothing where it is skipped.

    Bazel 4 analyses what a skipped target depends on, and would fetch another platform's packages for it.

    Args:
      platforms: as for only_on.
      labels: what the target depends on.

    Returns:
      a select of lists of labels. Its default means "skipped here"; that a platform is chosen at all is only_on's to
      see.
    """
    values = {"//arch_config:runs_" + p: labels for p in platforms}
    values["//conditions:default"] = []
    return select(values)

def platforms_with(**fields):
    """Names of the platforms whose row has these values, for only_on(): platforms_with(accelerator = "cuda")."""
    return [p for p in ALL_PLATFORMS if all([PLATFORMS[p][f] == fields[f] for f in fields])]

def declare_platforms():
    """Settings is_<platform>, runs_<platform> (on a host that it runs on), and groups by accelerator and CPU."""
    for p in ALL_PLATFORMS:
        native.config_setting(name = "is_" + p, flag_values = {":platform": p})
        native.config_setting(
            name = "runs_" + p,
            constraint_values = _host_constraints(p),
            flag_values = {":platform": p},
        )
    for field in ["accelerator", "cpu"]:
        values = {PLATFORMS[p][field]: None for p in ALL_PLATFORMS}
        for value in values:
            selects.config_setting_group(
                name = "any_" + value,
                match_any = [":is_" + p for p in platforms_with(**{field: value})],
            )
