"""Everything that can be wrong with a measurement."""

from __future__ import annotations

from enum import Enum

from rtp_llm.errors import RtpLlmError


class BenchFault(Enum):
    """Faults of ``rtp-llm bench``."""

    RUN_FAILED = "a contender ended with an error"
    VALUES_DIFFER = "two contenders, or two runs of one, loaded different values"
    NOT_COLD = "the page cache cannot be emptied of the files"
    NOT_WARM = "the page cache does not hold the files"
    NO_PLOT = "a picture was asked for and cannot be drawn"


class BenchError(RtpLlmError):
    """What was asked for cannot be measured."""

    step = "bench"
