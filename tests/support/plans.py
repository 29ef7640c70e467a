"""Plans of parts that a test makes by hand."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from rtp_llm import LoadConfig, ParallelConfig
from rtp_llm.checkpoint import Catalog
from rtp_llm.loader.budget.budget import scratch_budget
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.prepare import Prepared, prepare
from rtp_llm.plan.budget import Budget
from rtp_llm.plan.join import join
from rtp_llm.plan.pieces import ParamSpec
from rtp_llm.plan.plan import LoadPlan, ModelSide
from rtp_llm.plan.rules import Mapping


def joined(catalog: Catalog, mapping: Mapping, params: Iterable[ParamSpec], dtype: str = "float32", **model: Any) -> LoadPlan:
    """The plan of a model that is nothing but ``params``; ``model`` are other fields of its :class:`ModelSide`."""
    fields = {"architecture": "A", "family": "a", "parallel": ParallelConfig()} | model
    return join(catalog, mapping, ModelSide(dtype=dtype, params=tuple(params), **fields))


def prepared(folder: str | os.PathLike[str], load: LoadConfig | None = None, **parallel: int) -> Prepared:
    """A rank's load on the CPU, before a byte of weights is read."""
    return prepare(planning_context(folder, ParallelConfig(**parallel), load or LoadConfig(device="cpu")))


def budget_of(folder: str | os.PathLike[str], load: LoadConfig, **parallel: int) -> Budget:
    """What the own reader takes for it."""
    context = planning_context(folder, ParallelConfig(**parallel), load)
    return scratch_budget(context, prepare(context))
