"""The table of physical experts (``phy2log``, as DeepSeek's expert-parallel load balancer writes it), from its file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from rtp_llm.checkpoint.files import read_json
from rtp_llm.config import ConfigFault, ParallelConfig
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.parallel.experts import ExpertLayers, Ownership, check_ownership
from rtp_llm.parallel.groups import Groups

#: A table for the largest published model, 61 layers of 1,000 physical experts, is a third of a megabyte.
MAX_TABLE_BYTES = 16_000_000

_KEY = "phy2log"


def with_experts(groups: Groups, parallel: ParallelConfig, experts: ExpertLayers | None) -> Groups:
    """``groups`` with the experts of a model divided by the settings.

    Raises:
        CheckpointError: the table's file is missing or cannot be trusted.
        ConfigError: it holds no table.
        PlanError: model, table and ranks do not fit; everything wrong with them at once.
    """
    table = read_table(parallel.eplb, experts) if parallel.eplb is not None and experts is not None else {}
    ownership = Ownership(parallel.ep_size, table)
    if parallel.eplb is not None and experts is None:
        # Without experts any table is wrong: this one makes check_ownership report it.
        ownership = replace(ownership, table={0: ()})
    check_ownership(ownership, experts)
    return replace(groups, ep=replace(groups.ep, ownership=ownership))


def read_table(path: str, experts: ExpertLayers) -> dict[int, tuple[int, ...]]:
    """The table by layer number.

    The file is a JSON object whose key ``phy2log`` holds one row, for all layers with experts, or a list with a row for each
    of them, in order.  A row lists the logical expert of each physical one.
    """
    name = Path(path).name
    value = read_json(Path(path), name, MAX_TABLE_BYTES).get(_KEY)
    if _is_row(value):
        return dict.fromkeys(experts.layers, tuple(value))
    if not isinstance(value, list) or not value or not all(map(_is_row, value)):
        raise ConfigError(_problem(name, "holds no table", f'{{"{_KEY}": a list of experts, or of such lists}}', "something else"))
    if len(value) != len(experts.layers):
        raise ConfigError(
            _problem(name, "has a row too many or too few", f"{len(experts.layers)} rows, one a layer with experts", len(value))
        )
    return {layer: tuple(row) for layer, row in zip(experts.layers, value, strict=True)}


def _is_row(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list) and bool(value) and all(isinstance(e, int) and not isinstance(e, bool) for e in value)


def _problem(file: str, what: str, expected: str, actual: Any) -> Problem:
    return Problem(ConfigFault.BAD_VALUE, what, file=file, expected=expected, actual=str(actual), fix="see the documentation of --eplb")
