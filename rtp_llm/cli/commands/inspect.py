"""``rtp-llm inspect``: what a checkpoint holds, from headers only; needs neither torch nor a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from rtp_llm.cli.options import checkpoint_argument, common, output_of
from rtp_llm.cli.output import pairs, print_table, printable, size
from rtp_llm.errors import CheckpointError, Problem

if TYPE_CHECKING:
    from rtp_llm.checkpoint.catalog import Catalog


@click.command(
    short_help="Files, tensors and problems of a checkpoint.",
    epilog="\b\nExamples:\n  rtp-llm inspect ./SmolLM2-135M-Instruct\n  rtp-llm inspect ./SmolLM2-135M-Instruct --tensors --json",
)
@checkpoint_argument
@click.option("--tensors", is_flag=True, help="List every tensor: name, dtype, shape, file.")
@common
@click.pass_context
def inspect(context: click.Context, checkpoint: str, tensors: bool) -> int:
    """Show the files, tensors and problems of the checkpoint directory CKPT.

    Reads headers only. Problems forbid loading, and make the exit code 1; notes do not.
    """
    from rtp_llm.checkpoint import read_catalog

    catalog = read_catalog(checkpoint)
    architectures, problems = _architectures(checkpoint)
    problems = (*catalog.problems, *(p for p in problems if p not in catalog.problems))
    document = _document(catalog, architectures, problems)
    if tensors:
        document["tensor_list"] = [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes, "file": t.file} for t in catalog.tensors
        ]
    output_of(context).emit(document, lambda: _text(catalog, document, problems, tensors))
    return 1 if problems else 0


def _architectures(checkpoint: str) -> tuple[list[str], tuple[Problem, ...]]:
    """The architectures of ``config.json``, and its problems."""
    from rtp_llm.checkpoint import read_config

    try:
        return list(read_config(checkpoint)["architectures"]), ()
    except CheckpointError as error:
        return [], error.problems


def _document(catalog: Catalog, architectures: list[str], problems: Sequence[Problem]) -> dict[str, Any]:
    count: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    per_file: Counter[str] = Counter()
    for tensor in catalog.tensors:
        count[tensor.dtype] += 1
        nbytes[tensor.dtype] += tensor.nbytes
        per_file[tensor.file] += 1
    return {
        "directory": catalog.directory,
        "architectures": architectures,
        "identity": catalog.identity,
        "tensors": len(catalog.tensors),
        "bytes": sum(nbytes.values()),
        "dtypes": {name: {"tensors": count[name], "bytes": nbytes[name]} for name in sorted(count)},
        "files": [
            {"name": f.name, "format": f.format, "bytes": f.size, "tensors": per_file[f.name], "metadata": dict(f.metadata)}
            for f in catalog.files
        ],
        "problems": [problem.to_json() for problem in problems],
        "notes": [note.to_json() for note in catalog.notes],
    }


def _text(catalog: Catalog, document: dict[str, Any], problems: Sequence[Problem], tensors: bool) -> None:
    pairs(
        [
            ("checkpoint", document["directory"]),
            ("architecture", ", ".join(document["architectures"]) or "unknown"),
            ("tensors", f"{document['tensors']}, {size(document['bytes'])}"),
            ("identity", document["identity"] if document["tensors"] else "none"),
        ]
    )
    if document["files"]:
        print_table(
            ("file", "format", "tensors", "size"),
            [(f["name"], f["format"], f["tensors"], size(f["bytes"])) for f in document["files"]],
            frozenset({2, 3}),
        )
    if document["dtypes"]:
        print_table(
            ("dtype", "tensors", "size"),
            [(name, d["tensors"], size(d["bytes"])) for name, d in document["dtypes"].items()],
            frozenset({1, 2}),
        )
    if tensors:
        print_table(("tensor", "dtype", "shape", "file"), [(t.name, t.dtype, list(t.shape), t.file) for t in catalog.tensors])
    for title, found in (("problem", problems), ("note", catalog.notes)):
        for item in found:
            click.echo(f"{title}: {printable(item)}")
    click.echo(f"{len(problems)} problems" if problems else "no problems")
