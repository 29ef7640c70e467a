"""``rtp-llm warmup``: compile what a load would have to compile."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli.options import checkpoint_argument, command_settings, common, output_of, setting_options
from rtp_llm.cli.output import pairs
from rtp_llm.cli.session import check_checkpoint, kernel_lines

_EXAMPLES = """\b
Examples:
  rtp-llm warmup ./Qwen3-8B
  rtp-llm warmup ./Qwen3-8B --tp_size 4 --kernels flashinfer --json
"""


@click.command(short_help="Compile the kernels that a load would compile.", epilog=_EXAMPLES)
@checkpoint_argument
@setting_options("device", "dtype", "quantization", "kernels", "tp_size", "tp_rank", "ep_size", "ep_rank", "eplb")
@common
@click.pass_context
def warmup(context: click.Context, /, checkpoint: str, **flags: Any) -> int:
    """Compile the kernels that the model of the checkpoint directory CKPT needs, ahead of a load.

    Reads headers only. A load does the same while it reads weights; after a warmup on the same machine it compiles nothing.
    """
    settings = command_settings(flags, os.environ)
    check_checkpoint(checkpoint)

    from rtp_llm.loader.warmup import warm_up

    found = warm_up(Path(checkpoint), settings.parallel, settings.load).to_json()
    output_of(context).emit(found, lambda: pairs(kernel_lines(found) or [("kernels", "none are called")]))
    return 0
