"""Everything that can be wrong with a setting."""

from __future__ import annotations

from enum import Enum


class ConfigFault(Enum):
    """Faults of settings, wherever the value came from."""

    BAD_VALUE = "a setting has a value that is not allowed"
    NOT_SUPPORTED = "a setting asks for something that this version does not have"
    CONTRADICTION = "two settings cannot both hold"
