"""``rtp-llm models``: the families this version knows, and what each supports."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from rtp_llm.cli.options import common, output_of
from rtp_llm.cli.output import table


@click.command(short_help="Model families and what each supports.", epilog="\b\nExamples:\n  rtp-llm models\n  rtp-llm models --json")
@common
@click.pass_context
def models(context: click.Context) -> int:
    """List the model families, their architectures (as config.json names them) and what each supports."""
    from rtp_llm.models.registry import FAMILIES

    listed: list[dict[str, Any]] = [
        {"name": f.name, "kind": f.kind, "architectures": list(f.architectures), "features": dataclasses.asdict(f.features)}
        for f in FAMILIES
    ]

    def text() -> None:
        features = list(listed[0]["features"])
        rows = [(f["name"], f["kind"], *(_shown(f["features"][name]) for name in features), ", ".join(f["architectures"])) for f in listed]
        table(("family", "kind", *(name.replace("_", " ") for name in features), "architectures"), rows)

    output_of(context).emit({"families": listed}, text)
    return 0


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
