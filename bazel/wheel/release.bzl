"""The project's wheels, declared once for the root BUILD file."""

load("@project_facts//:facts.bzl", "VERSION")
load("//arch_config:arch_select.bzl", "ALL_PLATFORMS", "table_select", "whl_deps")
load(":wheel.bzl", "platform_wheel", "python_wheel")

def release_wheels(srcs, license_files, pyproject, readme):
    """Declares :wheel, :wheel_index, and :wheel_<platform>, :wheel_index_<platform> for every platform.

    Args:
      srcs: the package's files.
      license_files: licence files; pyproject.toml must name the same ones.
      pyproject: pyproject.toml, for what does not depend on the platform.
      readme: the long description.
    """
    common = {
        "distribution": "rtp-llm",
        "license_files": license_files,
        "local_version": table_select("local_version"),
        "pyproject": pyproject,
        "python": table_select("python"),
        "readme": readme,
        "srcs": srcs,
        "version": VERSION,
        "wheel_tag": table_select("wheel_tag"),
    }
    python_wheel(name = "wheel", requires = whl_deps(), **common)

    # Without URL requirements, for indexes that refuse them.
    python_wheel(name = "wheel_index", folder = "index", requires = whl_deps(urls = False), **common)

    # Every platform's wheels from a build of any one: for the metadata tests, and for a release.
    for kind in ["wheel", "wheel_index"]:
        for platform in ALL_PLATFORMS:
            platform_wheel(name = "{}_{}".format(kind, platform), platform = platform, wheel = ":" + kind)
