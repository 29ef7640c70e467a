"""``rtp-llm load``: load the weights, and report how it went."""

from __future__ import annotations

from typing import Any

import click

from rtp_llm.cli.options import LOAD_ALONE, LOADING, checkpoint_argument, common, output_of, setting_options
from rtp_llm.cli.session import load_for, print_report

_EXAMPLES = """\b
Examples:
  rtp-llm load ./Qwen3-8B
  rtp-llm load ./Qwen3-8B --verify --json
  rtp-llm load ./Qwen3-8B --tp_size 4 --rank 3        (the weights of one rank, alone)
  torchrun --nproc-per-node 4 -m rtp_llm.cli load ./Qwen3-8B
"""


@click.command(short_help="Load, and report bytes, time and memory.", epilog=_EXAMPLES)
@checkpoint_argument
@setting_options(*LOADING, *LOAD_ALONE)
@common
@click.pass_context
def load(context: click.Context, /, checkpoint: str, **flags: Any) -> int:
    """Load the checkpoint directory CKPT and report bytes, time and memory."""
    loaded, _ = load_for(context, checkpoint, flags, lambda: None)
    document = loaded.report.to_json()
    output_of(context).emit(document, lambda: print_report(document))
    return 0
