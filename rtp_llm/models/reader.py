"""How families read ``config.json``, and limits for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rtp_llm.checkpoint.fields import CONFIG_FILE, MAX_SIZE, FieldFaults, FieldReader
from rtp_llm.errors import ConfigError
from rtp_llm.models.faults import ModelFault

__all__ = ["CONFIG_FILE", "MAX_LAYERS", "MAX_POSITIONS", "MAX_SIZE", "FieldReader", "config_reader"]

#: The largest number of layers; published models have fewer than 200, and each takes a module, a millisecond to build,
#: and nine findings before anything is checked.
MAX_LAYERS: Final = 512

#: The largest context length, in tokens: what an int32 position can count.
MAX_POSITIONS: Final = 2**31 - 1

_FAULTS = FieldFaults(ModelFault.BAD_FIELD, ModelFault.UNSUPPORTED_FIELD, ConfigError)


def config_reader(raw: Mapping[str, Any]) -> FieldReader:
    """A reader of ``config.json``, which raises ``ConfigError``."""
    return FieldReader(raw, _FAULTS)
