"""What config.json asks for, and whether it can be loaded at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import Catalog
from rtp_llm.config import LoadConfig
from rtp_llm.config.faults import ConfigFault
from rtp_llm.errors import ConfigError, Problem
from rtp_llm.plan.dtypes import CASTABLE

#: Keys under which published checkpoints declare quantisation (compression_config: older compressed-tensors).
_QUANTISATION_KEYS = ("quantization_config", "compression_config")
#: ModelOpt declares it in a file of its own.
_QUANTISATION_FILE = "hf_quant_config.json"


def refuse_quantised(raw: Mapping[str, Any], directory: str) -> None:
    """Raises ``ConfigError`` for a checkpoint that says it is quantised: it is never loaded as what it is not."""
    texts = [("", raw), *((f"{key}.", raw[key]) for key in ("text_config",) if isinstance(raw.get(key), Mapping))]
    found = [(f"{prefix}{key}", part[key]) for prefix, part in texts for key in _QUANTISATION_KEYS if part.get(key)]
    problems = [
        _refusal("config.json", key, value.get("quant_method", value) if isinstance(value, Mapping) else value) for key, value in found
    ]
    if (Path(directory) / _QUANTISATION_FILE).exists():
        problems.append(_refusal(_QUANTISATION_FILE, "the file", "present"))
    if problems:
        raise ConfigError(problems)


def _refusal(file: str, key: str, value: object) -> Problem:
    return Problem(
        ConfigFault.NOT_SUPPORTED,
        f"{key} says that the weights are quantised, which is not supported yet",
        file=file,
        expected="no quantisation",
        actual=repr(value)[:80],
        fix="use the unquantised checkpoint of this model",
    )


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
    # Ties go to the wider type: nothing is lost by it.
    order = list(CASTABLE.values())
    return max(stored, key=lambda name: (stored[name], -order.index(name))) if stored else "float32"
