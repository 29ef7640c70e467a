"""``rtp-llm export``: load a checkpoint and write it back as a plain Hugging Face directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli.options import LOADING, checkpoint_argument, common, output_of, setting_options
from rtp_llm.cli.output import pairs, size
from rtp_llm.cli.session import load_for
from rtp_llm.config import LoadConfig

_EXAMPLES = """\b
Examples:
  rtp-llm export ./Qwen3-8B ./Qwen3-8B-copy
  torchrun --nproc-per-node 2 -m rtp_llm.cli export ./Qwen3-8B ./Qwen3-8B-copy
"""


@click.command(short_help="Load, and write a plain checkpoint back.", epilog=_EXAMPLES)
@checkpoint_argument
@click.argument("out", metavar="OUT", type=click.Path())
@setting_options(*LOADING)
@common
@click.pass_context
def export(context: click.Context, /, checkpoint: str, out: str, **flags: Any) -> int:
    """Load CKPT and write the model's weights back, unsharded and under their first names, into the directory OUT."""
    loaded, _ = load_for(context, checkpoint, flags, lambda: _prepare(checkpoint, out), lambda load: _exact(load, checkpoint))

    from rtp_llm.loader import export_checkpoint

    export_checkpoint(loaded, Path(out))
    output = output_of(context)
    if output.speaks:  # on another host OUT need not exist
        sizes = {path.name: path.stat().st_size for path in sorted(Path(out).iterdir()) if path.is_file()}
        document = {"directory": out, "files": [{"name": n, "bytes": b} for n, b in sizes.items()], "load": loaded.report.to_json()}
        rows: list[tuple[str, object]] = [("exported to", out), *((name, size(nbytes)) for name, nbytes in sizes.items())]
        output.emit(document, lambda: pairs(rows))
    return 0


def _prepare(checkpoint: str, out: str) -> None:
    """Refuses a directory that cannot be written to before minutes are spent on loading."""
    from rtp_llm.loader.export.files import check_room

    check_room(Path(out), checkpoint, 0)


def _exact(load: LoadConfig, checkpoint: str) -> LoadConfig:
    """``load`` with a dtype that holds every stored weight exactly, unless the user set one, and without compiled kernels.

    ``config.json`` may name a narrower dtype, from which the stored values cannot be restored.
    """
    from rtp_llm.checkpoint import read_catalog
    from rtp_llm.plan.dtypes import CASTABLE, widest

    load = replace(load, kernels="torch") if load.kernels == "auto" else load
    stored = {CASTABLE[tensor.dtype] for tensor in read_catalog(checkpoint).tensors if tensor.dtype in CASTABLE}
    return replace(load, dtype=widest(stored)) if stored and load.dtype == "auto" else load
