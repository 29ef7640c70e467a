"""The dtype of parameters, by the settings and config.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rtp_llm.checkpoint import Catalog
from rtp_llm.config import LoadConfig
from rtp_llm.config.faults import ConfigFault
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.plan.dtypes import CASTABLE


def choose_dtype(load: LoadConfig, raw: Mapping[str, Any], catalog: Catalog) -> str:
    """torch's name of the parameters' dtype: the setting, else what config.json says, else what most bytes are.

    Raises:
        ConfigError: where config.json names a dtype that parameters cannot have.
    """
    if load.dtype != "auto":
        return load.dtype
    stated = raw.get("dtype", raw.get("torch_dtype"))
    if stated is not None:
        name = str(stated).removeprefix("torch.")
        if name in CASTABLE.values():
            return name
        raise ConfigError(
            Problem(
                ConfigFault.NOT_SUPPORTED,
                "dtype is not one that weights can be kept in",
                file="config.json",
                expected=f"one of {sorted(CASTABLE.values())}",
                actual=repr(stated)[:80],
                fix="choose one with --dtype",
            )
        )
    stored: Counter[str] = Counter()
    for tensor in catalog.tensors:
        if tensor.dtype in CASTABLE:
            stored[CASTABLE[tensor.dtype]] += tensor.nbytes
    # Ties go to the wider type, which loses nothing.
    order = list(CASTABLE.values())
    return max(stored, key=lambda name: (stored[name], -order.index(name))) if stored else "float32"
