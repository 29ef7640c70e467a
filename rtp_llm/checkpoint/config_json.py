"""``config.json`` and the other small JSON files beside the weights, read without trusting them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import finding, read_json, shown
from rtp_llm.errors import CheckpointError

#: ``tokenizer_config.json`` with all added tokens is the largest of these files, at a few megabytes.
MAX_JSON_BYTES = 16_000_000


def read_config(directory: str | Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint, with ``architectures`` a non-empty list of strings.

    Raises CheckpointError when the file is absent, cannot be trusted (see ``files.read_json``), or names no
    architecture.
    """
    config = read_json_file(directory, "config.json")
    if config is None:
        problem = finding(
            CheckpointFault.NO_CONFIG,
            "no config.json",
            file="config.json",
            expected=f"the file in {shown(str(directory))}",
            actual="nothing",
            fix="give a directory in Hugging Face's layout",
        )
        raise CheckpointError(problem)
    names = config.get("architectures")
    if not (isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)):
        problem = finding(
            CheckpointFault.NO_ARCHITECTURE,
            "the key architectures does not name a model class",
            file="config.json",
            expected='a list of names, e.g. ["LlamaForCausalLM"]',
            actual="nothing" if names is None else shown(repr(names)),
            fix="add the architecture that the weights belong to",
        )
        raise CheckpointError(problem)
    return config


def read_json_file(directory: str | Path, name: str) -> dict[str, Any] | None:
    """A JSON object beside the weights, such as ``generation_config.json`` or ``1_Pooling/config.json``.

    ``name`` is chosen by the program, never taken from a checkpoint.  None where the file is absent; CheckpointError
    where it is there and cannot be trusted.
    """
    path = Path(directory) / name
    if not path.exists() and not path.is_symlink():
        return None
    return read_json(path, name, MAX_JSON_BYTES)
