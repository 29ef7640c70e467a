"""checkpoints: the two small real models of tools/fetch_models.py, made once for all tests."""

def _impl(ctx):
    out = ctx.actions.declare_directory(ctx.label.name)
    ctx.actions.run(
        executable = ctx.executable.fetch,
        arguments = ["--cache", out.path],
        outputs = [out],
        mnemonic = "Checkpoints",
        progress_message = "Converting the test models",
        env = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "2",
            # transformers' GGUF reader draws a bar that no setting of its own turns off.
            "TQDM_DISABLE": "1",
        },
        use_default_shell_env = True,
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles(files = [out]))]

checkpoints = rule(
    implementation = _impl,
    attrs = {
        # cfg target: the tool needs the platform's own torch, and the platform is a setting of the target.
        "fetch": attr.label(cfg = "target", executable = True, mandatory = True),
    },
)
