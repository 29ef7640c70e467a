"""``rtp-llm settings``: every setting, and the value that holds in this environment."""

from __future__ import annotations

import os

import click

from rtp_llm.cli.options import command_settings, common, output_of
from rtp_llm.cli.output import print_table
from rtp_llm.config.setting import spelled


@click.command(
    short_help="Every setting, and the value that holds here.",
    epilog="\b\nExamples:\n  rtp-llm settings\n  RTP_LLM_DEVICE=cpu rtp-llm settings --json",
)
@common
@click.pass_context
def settings(context: click.Context) -> int:
    """List every setting: flag, environment variable, allowed values, and its value here with where that comes from."""
    resolved = command_settings({}, os.environ).resolved
    listed = [
        {
            "name": c.setting.name,
            "flags": list(c.setting.flags + c.setting.off),
            "environment_variable": c.setting.env,
            "allowed": c.setting.kind.allowed,
            "default": c.setting.default,
            "value": c.value,
            "source": c.source,
            "help": c.setting.help,
        }
        for c in resolved
    ]

    def text() -> None:
        rows = [(c.setting.flags[0], c.setting.env, c.setting.kind.allowed, spelled(c.value), c.source) for c in resolved]
        print_table(("flag", "environment variable", "allowed", "value", "from"), rows)

    output_of(context).emit({"settings": listed}, text)
    return 0
