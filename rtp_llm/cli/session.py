"""What the commands that load weights have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rtp_llm.cli.options import command_settings, output_of
from rtp_llm.cli.output import pairs, size
from rtp_llm.cli.progress import choose_progress
from rtp_llm.cli.ranks import launched
from rtp_llm.config import LoadConfig

if TYPE_CHECKING:
    from rtp_llm.layers.cache import CacheSize
    from rtp_llm.loader import LoadedModel

T = TypeVar("T")


def check_checkpoint(checkpoint: str) -> None:
    """Refuses a bad checkpoint before torch is imported, which takes seconds.

    Raises:
        CheckpointError: everything that is wrong with the files and with ``config.json``.
    """
    from rtp_llm.checkpoint import read_catalog, read_config

    read_catalog(checkpoint).raise_for_problems()
    read_config(checkpoint)


def load_for(
    context: click.Context,
    checkpoint: str,
    flags: Mapping[str, Any],
    prepare: Callable[[], T],
    refine: Callable[[LoadConfig], LoadConfig] = lambda load: load,
    cache: Callable[[T], CacheSize] | None = None,
) -> tuple[LoadedModel, T]:
    """The loaded model and the result of ``prepare``; logs settings and shows progress on stderr.

    ``prepare`` reads small files and refuses what the checkpoint cannot do, before the load.  A single process calls it before
    torch is imported.  Of several ranks, one rank's error is raised on all, since the others would wait for it.
    ``refine`` may change settings that the user left open; ``cache`` is the cache that has to fit beside the weights.
    """
    output = output_of(context)
    settings = command_settings(flags, os.environ)
    output.note(settings.text())
    made: list[T] = []

    def ready() -> CacheSize | None:
        if not made:
            check_checkpoint(checkpoint)
            made.append(prepare())
        return None if cache is None else cache(made[0])

    if launched(os.environ) is None:
        ready()

    from rtp_llm.loader import load_model

    progress = choose_progress(settings.load.progress, output.speaks)
    loaded = load_model(Path(checkpoint), parallel=settings.parallel, load=refine(settings.load), progress=progress, cache=ready)
    return loaded, made[0]


def place(document: Mapping[str, Any]) -> str:
    """A rank's place, from a plan or a report: ``1 of 2``, and its expert-parallel group if there are several."""
    text = f"{document['tp_rank']} of {document['tp_size']}"
    return text if document["ep_size"] == 1 else f"{text}, expert-parallel {document['ep_rank']} of {document['ep_size']}"


def print_report(report: Mapping[str, Any]) -> None:
    """The load report as text."""
    transport = report["phases"]["transport"]
    peak = report["measured_peak_bytes"]
    verified = [] if report["verified"] is None else [("verified", f"{report['verified']} places compared with a second reader's bytes")]
    pairs(
        [
            ("architecture", f"{report['architecture']}, rank {place(report)}"),
            ("parameters", f"{report['parameters']:,}, {size(report['bytes_resident'])} resident"),
            ("method", _method(report)),
            ("read", f"{size(report['bytes_read'])} in {transport:.2f} s, {report['gb_per_s']:.2f} GB/s"),
            ("peak memory", f"{'not' if peak is None else size(peak)} measured, {size(report['predicted_peak_bytes'])} predicted"),
            ("slow path", f"{report['slow_path_weights']} weights"),
            *kernel_lines(report["kernels"]),
            *verified,
            ("phases", ", ".join(f"{name} {spent:.2f} s" for name, spent in report["phases"].items())),
            ("plan digest", report["digest"]),
        ]
    )


def kernel_lines(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """A line for each back end and reason, with its operations; and what was compiled."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for choice in found["operations"]:
        by_reason.setdefault((choice["backend"], choice["reason"]), []).append(choice["op"])
    lines = [("kernels", f"{backend} for {', '.join(ops)} ({reason})") for (backend, reason), ops in by_reason.items()]
    made = found["compiled"]
    if made is not None:
        what = f"{len(made['fresh'])} of {len(made['modules'])} modules in {made['seconds']:.1f} s, in {made['directory']}"
        lines.append(("compiled", what))
    return lines


def _method(report: Mapping[str, Any]) -> str:
    reason = f" ({report['degraded_reason']})" if report["degraded_reason"] else ""
    return f"{report['effective_mode']}, asked for {report['requested_mode']}{reason}"
