"""``rtp-llm models``: the families this version knows, and what each supports."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from rtp_llm.cli.options import common, output_of
from rtp_llm.cli.output import print_table
from rtp_llm.config.load import QUANTIZATION_METHODS


@click.command(short_help="Model families and what each supports.", epilog="\b\nExamples:\n  rtp-llm models\n  rtp-llm models --json")
@common
@click.pass_context
def models(context: click.Context) -> int:
    """List the model families, their architectures (as config.json names them), what each supports, and the methods of
    quantisation."""
    from rtp_llm.models.registry import FAMILIES
    from rtp_llm.quantization.registry import METHODS

    listed: list[dict[str, Any]] = [
        {"name": f.name, "kind": f.kind, "architectures": list(f.architectures), "features": dataclasses.asdict(f.features)}
        for f in FAMILIES
    ]

    def text() -> None:
        features = list(listed[0]["features"])
        rows = [
            (f["name"], f["kind"], *(_feature(name, f["features"]) for name in features), ", ".join(f["architectures"])) for f in listed
        ]
        print_table(("family", "kind", *(name.replace("_", " ") for name in features), "architectures"), rows)
        print_table(
            ("quantisation", "schemes", "tensor parallel", "CPU", "CUDA", "export"),
            [(m.name, m.schemes, m.tensor_parallel, m.cpu, m.cuda, _shown(m.export)) for m in METHODS],
        )

    methods = [
        {
            "name": m.name,
            "schemes": m.schemes,
            "layers": list(m.layers),
            "tensor_parallel": m.tensor_parallel,
            "cpu": m.cpu,
            "cuda": m.cuda,
            "export": m.export,
        }
        for m in METHODS
    ]
    output_of(context).emit({"families": listed, "quantization": methods}, text)
    return 0


def _feature(name: str, features: dict[str, Any]) -> str:
    # The names of all methods in every row would make the table too wide.
    every = name == "quantization" and tuple(features[name]) == QUANTIZATION_METHODS
    return "all methods" if every else _shown(features[name])


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
