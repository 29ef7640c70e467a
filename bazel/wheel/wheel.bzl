"""python_wheel: a wheel whose name, tag and Requires-Dist follow the platform; platform_wheel: one platform's wheel
from a build of any."""

def _destination(file):
    return file.short_path + "=" + file.path

def _wheel_impl(ctx):
    version = ctx.attr.version + "+" + ctx.attr.local_version
    name = "{}-{}-{}.whl".format(ctx.attr.distribution.replace("-", "_"), version, ctx.attr.wheel_tag)

    # Every platform shares one output folder, so the platform is in the name; the variant gets a folder.
    out = ctx.actions.declare_file(ctx.attr.folder + "/" + name if ctx.attr.folder else name)
    args = ctx.actions.args()
    args.use_param_file("@%s", use_always = True)
    args.set_param_file_format("multiline")
    args.add("--out", out)
    args.add("--pyproject", ctx.file.pyproject)
    args.add("--readme", ctx.file.readme)
    args.add("--version", version)
    args.add("--tag", ctx.attr.wheel_tag)
    args.add("--python", ctx.attr.python)
    args.add_all(ctx.attr.requires, before_each = "--requires")
    args.add_all(ctx.files.license_files, before_each = "--license", map_each = _destination)
    args.add_all(ctx.files.srcs, before_each = "--file", map_each = _destination)
    ctx.actions.run(
        executable = ctx.executable._build_wheel,
        arguments = [args],
        inputs = ctx.files.srcs + ctx.files.license_files + [ctx.file.pyproject, ctx.file.readme],
        outputs = [out],
        mnemonic = "PythonWheel",
        progress_message = "Packing " + out.short_path,
        use_default_shell_env = True,  # SOURCE_DATE_EPOCH, from .bazelrc
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

# srcs are files, not py_library targets: a wheel that depended on libraries would fetch every package they need.
python_wheel = rule(
    implementation = _wheel_impl,
    attrs = {
        "distribution": attr.string(mandatory = True),
        "folder": attr.string(doc = "folder of the output, for a second wheel of the same name"),
        "license_files": attr.label_list(allow_files = True, mandatory = True),
        "local_version": attr.string(mandatory = True),
        "pyproject": attr.label(allow_single_file = True, mandatory = True),
        "python": attr.string(mandatory = True, doc = "the one minor version, like 3.12"),
        "readme": attr.label(allow_single_file = True, mandatory = True),
        "requires": attr.string_list(mandatory = True),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "version": attr.string(mandatory = True),
        "wheel_tag": attr.string(mandatory = True),
        "_build_wheel": attr.label(default = "//bazel/wheel:build_wheel", cfg = "exec", executable = True),
    },
)

def _platform_impl(_settings, attr):
    return {"//arch_config:platform": attr.platform}

_platform = transition(
    implementation = _platform_impl,
    inputs = [],
    outputs = ["//arch_config:platform"],
)

def _platform_wheel_impl(ctx):
    files = depset(transitive = [w[DefaultInfo].files for w in ctx.attr.wheel])
    return [DefaultInfo(files = files, runfiles = ctx.runfiles(transitive_files = files))]

platform_wheel = rule(
    implementation = _platform_wheel_impl,
    attrs = {
        "platform": attr.string(mandatory = True),
        "wheel": attr.label(cfg = _platform, mandatory = True),
        "_allowlist_function_transition": attr.label(
            default = "@bazel_tools//tools/allowlists/function_transition_allowlist",
        ),
    },
)

def _metadata_impl(ctx):
    wheel = ctx.attr.wheel[DefaultInfo].files.to_list()[0]
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable._unpack,
        arguments = [wheel.path, out.path],
        inputs = [wheel],
        outputs = [out],
        mnemonic = "WheelMetadata",
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

# The .dist-info folder of a wheel, so that tests see the distribution as installed: its version, its entry points.
wheel_metadata = rule(
    implementation = _metadata_impl,
    attrs = {
        "wheel": attr.label(mandatory = True),
        "_unpack": attr.label(default = "//bazel/wheel:unpack_metadata", cfg = "exec", executable = True),
    },
)
