"""``rtp-llm plan``: what a load would do, without doing it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli.options import checkpoint_argument, common, output_of, resolve, setting_options
from rtp_llm.cli.output import printable
from rtp_llm.cli.session import check_checkpoint


@click.command(
    short_help="What one rank would read, and the memory it needs.",
    epilog="\b\nExamples:\n  rtp-llm plan ./Qwen3-8B\n  rtp-llm plan ./Qwen3-8B --tp_size 4 --rank 3 --json",
)
@checkpoint_argument
@setting_options("tp_size", "tp_rank", "ep_size", "dtype", "quantization", "reader_threads", "buffer_mib")
@common
@click.pass_context
def plan(context: click.Context, /, checkpoint: str, **flags: Any) -> int:
    """Show what one rank would read of the checkpoint directory CKPT, and the memory that it would need.

    Reads headers only. A checkpoint that does not fit its model makes the exit code 1.
    """
    settings = resolve(flags, os.environ)
    check_checkpoint(checkpoint)

    from rtp_llm.loader import build_plan

    made = build_plan(Path(checkpoint), parallel=settings.parallel, load=settings.load)
    document = made.to_json() | {"problems": [problem.to_json() for problem in made.problems]}
    output_of(context).emit(document, lambda: click.echo(printable(made.text(), keep="\n")))
    return 1 if made.problems else 0
