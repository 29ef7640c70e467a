"""``rtp-llm plan``: what a load would do, without doing it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli.options import checkpoint_argument, command_settings, common, output_of, setting_options
from rtp_llm.cli.output import pairs, print_table, printable, ranges, size
from rtp_llm.cli.session import check_checkpoint, place
from rtp_llm.errors import Problem


@click.command(
    short_help="What one rank would read, and the memory it needs.",
    epilog="\b\nExamples:\n  rtp-llm plan ./Qwen3-8B\n  rtp-llm plan ./Qwen3-8B --tp_size 4 --rank 3 --json",
)
@checkpoint_argument
@setting_options("tp_size", "tp_rank", "ep_size", "ep_rank", "eplb", "dtype", "quantization", "reader_threads", "buffer_mib")
@common
@click.pass_context
def plan(context: click.Context, /, checkpoint: str, **flags: Any) -> int:
    """Show what one rank would read of the checkpoint directory CKPT, and the memory that it would need.

    Reads headers only. A checkpoint that does not fit its model makes the exit code 1.
    """
    settings = command_settings(flags, os.environ)
    check_checkpoint(checkpoint)

    from rtp_llm.loader.budget.budget import predictions
    from rtp_llm.loader.context import planning_context
    from rtp_llm.loader.prepare import prepare
    from rtp_llm.plan.views import plan_json

    planning = planning_context(Path(checkpoint), settings.parallel, settings.load)
    prepared = prepare(planning)
    budgets, problems = list(predictions(planning, prepared)), prepared.plan.problems
    by_transport = {budget.transport: budget.to_json() for budget in budgets}
    document = plan_json(prepared.plan, budgets[0]) | {"transports": by_transport, "problems": [problem.to_json() for problem in problems]}
    output_of(context).emit(document, lambda: _text(document, problems))
    return 1 if problems else 0


def _text(document: dict[str, Any], problems: tuple[Problem, ...]) -> None:
    pairs(
        [
            ("architecture", f"{document['architecture']} (family {document['family']})"),
            ("rank", place(document)),
            ("parameters", f"{document['parameters']:,} in {document['tensors']} tensors, {document['dtype']}"),
            ("resident", size(document["bytes_resident"])),
            ("read", size(document["bytes_read"])),
            *((f"peak memory, {name}", _memory(taken)) for name, taken in document["transports"].items()),
            ("plan digest", document["digest"]),
        ]
    )
    rows = [(f["name"], f["reads"], size(f["bytes_read"]), size(f["bytes"])) for f in document["files"]]
    print_table(("file", "reads", "read", "size"), rows, frozenset({1, 2, 3}))
    _quantization(document["quantization"])
    _experts(document)
    _skipped(document)
    _listed("missing", document["missing"])
    _listed("unexpected", document["unexpected"])
    _listed("note", [Problem.from_json(note) for note in document["notes"]])
    _listed("problem", problems)
    click.echo(f"{len(problems)} problems" if problems else "no problems")


def _memory(taken: dict[str, int]) -> str:
    making = f" and {size(taken['bytes_making'])} weights on their way" if taken["bytes_making"] else ""
    return f"{size(taken['predicted_peak_bytes'])}, {size(taken['bytes_staging'])} of it staging buffers{making}"


#: Most lines of one kind; of the rest only the number: a checkpoint of another model has as many as tensors.
_MOST_LISTED = 100


def _listed(label: str, things: Sequence[object]) -> None:
    for thing in things[:_MOST_LISTED]:
        click.echo(f"{label}: {printable(thing)}")
    if len(things) > _MOST_LISTED:
        click.echo(f"{label}: ... and {len(things) - _MOST_LISTED} more (--json lists all)")


#: Most skipped tensors of one reason; of more only the number: a layer of experts has hundreds.
_MOST_SKIPPED = 8


def _skipped(document: dict[str, Any]) -> None:
    by_reason: dict[str, list[str]] = {}
    for skipped in document["skipped"]:
        by_reason.setdefault(skipped["reason"], []).append(skipped["tensor"])
    for reason, tensors in by_reason.items():
        if len(tensors) > _MOST_SKIPPED:
            click.echo(f"skipped: {len(tensors)} tensors, {printable(tensors[0])} and others: {printable(reason)}")
        else:
            for tensor in tensors:
                click.echo(f"skipped: {printable(tensor)}: {printable(reason)}")


#: Entries of lists, and modules, in one line, beyond which only their number is printed: some configurations list every norm.
_MOST_NAMED = 8


def _quantization(found: dict[str, Any] | None) -> None:
    if found is None:
        return
    for scheme in found["schemes"]:
        click.echo(f"quantised by {found['method']}: {scheme['modules']} modules, {scheme['scheme']}")
    idle = [listed["entry"] for listed in found["lists"] if not listed["matched"]]
    for label, names in (("listed and matching nothing", idle), ("plain, and nothing is declared of it", found["undeclared"])):
        shown = ", ".join(map(printable, names[:_MOST_NAMED]))
        if names:
            click.echo(f"{label}: {shown}{f' and {len(names) - _MOST_NAMED} more' if len(names) > _MOST_NAMED else ''}")


#: Most rows of the expert table; of more only this rank's.
_MOST_ROWS = 128


def _experts(document: dict[str, Any]) -> None:
    """Which rank has which experts: a row for each rank and run of equal layers."""
    rows = []
    for entry in document["experts"]:
        layouts = sorted({*entry["layout"].values()})
        for rank in entry["ranks"]:
            numbers = (ranges(entry["layers"]), rank["ep_rank"], ranges(rank["experts"]), size(rank["bytes"]), " and ".join(layouts))
            rows.append(numbers)
    if len(rows) > _MOST_ROWS:
        rows = [row for row in rows if row[1] == document["ep_rank"]]
        click.echo(f"experts of expert-parallel rank {document['ep_rank']} (--json lists all ranks):")
    if rows:
        print_table(("layers", "ep rank", "experts", "bytes a layer", "in the checkpoint"), rows, frozenset({1, 3}))
