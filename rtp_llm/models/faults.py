"""Everything that can be wrong with a model's configuration."""

from __future__ import annotations

from enum import Enum


class ModelFault(Enum):
    """Faults of ``config.json`` and of the registry."""

    BAD_FIELD = "a field of config.json has a value that no model can have"
    ABSENT_FIELD = "config.json lacks a field that the others make necessary"
    UNSUPPORTED_FIELD = "config.json asks for something that this family does not do"
    UNKNOWN_ARCHITECTURE = "no model family knows the architecture"
    DUPLICATE_ARCHITECTURE = "two model families claim one architecture"
