"""Everything that can be wrong with quantised weights."""

from __future__ import annotations

from enum import Enum

from rtp_llm.errors import RtpLlmError


class QuantFault(Enum):
    """Faults of a declaration, of its tensors, and of their values."""

    UNKNOWN_METHOD = "a quantisation method that is not registered"
    UNSUPPORTED_SCHEME = "a method is known, and this way of using it is not supported"
    BAD_DECLARATION = "a field of the quantisation's declaration has a value that it cannot have"
    CONTRADICTION = "what is declared and what the tensors are do not agree"
    UNSUPPORTED_LAYER = "a layer of this kind cannot be quantised"
    FUSED_DISAGREE = "matrices that run as one are quantised differently"
    MISSING_PART = "a quantised weight lacks a tensor without which it has no value"
    WRONG_GRID = "scales are not laid out as declared"
    MISALIGNED = "ranks would cut through what is packed or scaled as one"
    BAD_SCALE = "a scale is not a finite number"
    BAD_INDEX = "a group index is out of range"
    BAD_CODE = "a quantised code is outside of what the format allows"
    SLOW_PATTERN = "an exclusion's regular expression takes too long"


class QuantizationError(RtpLlmError):
    """Quantised weights that cannot be loaded."""

    step = "quantisation"
