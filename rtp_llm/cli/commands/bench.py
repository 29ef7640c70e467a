"""``rtp-llm bench``: this package and other loaders in turn, against the limits of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli.options import checkpoint_argument, command_settings, common, output_of, setting_options
from rtp_llm.cli.output import pairs, print_table, printable, size
from rtp_llm.cli.ranks import launched
from rtp_llm.cli.session import check_checkpoint
from rtp_llm.config import ConfigFault
from rtp_llm.errors import ConfigError, Problem

_EXAMPLES = """\b
Examples:
  rtp-llm bench ./Qwen3-8B
  rtp-llm bench ./Qwen3-8B --runs 3 --contenders rtp-llm,safetensors --cache warm
  rtp-llm bench ./Qwen3-8B --plot loading.png --json
"""

#: With more runs the median no longer gets steadier.
_MOST_RUNS = 100

_STATES = {"both": ("warm", "cold"), "warm": ("warm",), "cold": ("cold",)}


@click.command(short_help="Measure loading against other loaders and the machine's limits.", epilog=_EXAMPLES)
@checkpoint_argument
@click.option("--runs", type=click.IntRange(1, _MOST_RUNS), default=5, show_default=True, help="Runs of each loader.")
@click.option("--contenders", metavar="A,B,...", help="Loaders to measure, in this order. Left out: all that are installed.")
@click.option(
    "--cache",
    type=click.Choice(list(_STATES)),
    default="both",
    show_default=True,
    help="Measure with the files in the page cache (warm), without (cold), or both.",
)
@click.option("--drop_caches", is_flag=True, help="Drop the whole machine's page cache if dropping the files' pages is not enough.")
@click.option(
    "--plot",
    metavar="FILE.png",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw bytes over time, and speeds; needs matplotlib.",
)
@setting_options("device", "reader_threads", "buffer_mib", "tp_size", "tp_rank", "ep_size", "ep_rank")
@common
@click.pass_context
def bench(
    context: click.Context,
    /,
    checkpoint: str,
    runs: int,
    contenders: str | None,
    cache: str,
    drop_caches: bool,
    plot: Path | None,
    **flags: Any,
) -> int:
    """Measure how fast the weights of CKPT get to the device: this package, and other loaders that are installed.

    Each run is a process of its own, and contenders take turns. Values are compared by a checksum over every weight.
    The exit code is 1 if values differ or a contender fails.
    """
    if launched(os.environ) is not None:
        problem = Problem(
            ConfigFault.CONTRADICTION,
            "bench measures one process at a time",
            expected="no launcher",
            actual="RANK and WORLD_SIZE are set",
            fix="run it without torchrun; --tp_size and --tp_rank choose the rank that is measured",
        )
        raise ConfigError(problem)
    output, settings = output_of(context), command_settings(flags, os.environ)
    check_checkpoint(checkpoint)

    from rtp_llm.bench.contenders import CONTENDERS
    from rtp_llm.bench.measure import record, run_bench
    from rtp_llm.bench.plot import check_plot, draw_bench
    from rtp_llm.bench.request import BenchRequest
    from rtp_llm.checkpoint import read_catalog
    from rtp_llm.loader import build_plan
    from rtp_llm.loader.device import resolve_device

    names = _chosen(contenders, tuple(c.name for c in CONTENDERS))
    if plot is not None:
        check_plot(plot)
    device = str(resolve_device(settings.load.device, 0))
    # A checkpoint that cannot be loaded is refused once, not by every contender.
    build_plan(checkpoint, settings.parallel, settings.load).raise_for_problems()
    request = BenchRequest(read_catalog(checkpoint), device, settings.load, settings.parallel, names, runs, _STATES[cache], drop_caches)
    document = run_bench(request, output.note)
    if plot is not None:
        draw_bench(plot, document, {state: record(request, "rtp-llm", state) for state in document["cache"]["states"]})
    output.emit(document, lambda: _text(document))
    return 1 if document["problems"] else 0


def _chosen(given: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    if given is None:
        return known
    names = tuple(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise ConfigError(
            Problem(
                ConfigFault.BAD_VALUE, "no such contender", expected=f"some of {', '.join(known)}", actual=", ".join(unknown) or repr(given)
            )
        )
    return names


def _text(document: dict[str, Any]) -> None:
    machine = document["machine"]
    pairs(
        [
            (
                "checkpoint",
                f"{document['checkpoint']}: {size(document['bytes'])} in {document['tensors']} tensors, {document['files']} files",
            ),
            ("device", f"{document['device']} ({machine['device_name']})"),
            ("rank", f"tp {document['tp_rank']} of {document['tp_size']}, ep {document['ep_rank']} of {document['ep_size']}"),
            ("machine", f"{machine['cpu']}, {machine['cpus']} CPUs, {size(machine['memory_bytes'])}, {machine['file_system']}"),
            ("versions", f"python {machine['python']}, torch {machine['torch']}, kernel {machine['kernel']}"),
            ("date", f"{document['date']}, load average before {machine['load_average']:.1f}"),
            ("cold", _cold(document["cache"]["cold"])),
        ]
    )
    limits = [
        (name, f"{m['gb_per_s']:.2f}", _range(m["range"], 2), m["threads"], m["reason"] or m["what"])
        for name, m in document["limits"].items()
    ]
    print_table(("limit", "GB/s", "range", "threads", ""), limits, frozenset({1, 3}))
    rows = [row for state in document["cache"]["states"] for c in document["contenders"] if (row := _row(c, state)) is not None]
    columns = ("cache", "loader", "version", "median s", "range", "GB/s", "of limit", "start-up s", "peak host", "peak device", "values")
    print_table(columns, rows, frozenset({3, 5, 6, 7, 8, 9}))
    for c in document["contenders"]:
        if c["status"] != "measured":
            click.echo(f"{c['status']}: {c['name']} ({printable(c['what'])}): {printable(c['reason'])}")
    for problem in document["problems"]:
        click.echo(f"problem: {printable(Problem.from_json(problem))}")
    click.echo(f"{len(document['problems'])} problems" if document["problems"] else "no problems")


def _cold(cold: dict[str, Any] | None) -> str:
    if cold is None:
        return "not asked for"
    return f"by {cold['how']}, checked with mincore" if cold["possible"] else f"not measured: {cold['reason']}"


def _row(contender: dict[str, Any], state: str) -> tuple[object, ...] | None:
    result = contender["results"].get(state)
    if result is None:
        return None
    startup = result["startup_seconds"]
    device = result["peak_device_bytes"]
    return (
        state,
        contender["name"],
        contender["version"],
        f"{result['seconds']:.3f}",
        _range(result["range"], 3),
        f"{result['gb_per_s']:.2f}",
        "" if result["ratio"] is None else f"{result['ratio']:.2f}",
        "" if startup is None else f"{startup:.2f}",
        "" if result["peak_host_bytes"] is None else size(result["peak_host_bytes"]),
        "" if device is None else size(device),
        _values(contender),
    )


def _values(contender: dict[str, Any]) -> str:
    if not contender["places"]:
        return "not comparable"
    part = "" if contender["places"] == contender["wanted"] else f" ({contender['places']} of {contender['wanted']} places)"
    return f"{contender['checksum'][:8]}{part}"


def _range(ends: list[float], digits: int) -> str:
    return f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
