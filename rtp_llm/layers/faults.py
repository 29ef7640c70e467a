"""Everything that can be wrong with what a layer or a forward pass is asked to do."""

from __future__ import annotations

from enum import Enum

from rtp_llm.errors import RtpLlmError


class LayerFault(Enum):
    """Faults of layers and of their inputs."""

    UNKNOWN_ACTIVATION = "an activation function that no layer knows"
    UNKNOWN_POOLING = "a way of pooling that is not there"
    BAD_INPUT = "a tensor that the model cannot take"
    CACHE_TOO_SMALL = "the KV cache has no room for the tokens"
    NO_PAGES = "the KV cache has no free pages for the tokens"
    NO_CACHE_ROW = "the KV cache has no row for another sequence"
    NO_POOLER = "the checkpoint holds no pooler"
    INTERNAL = "a layer of rtp-llm does not do what it has to"


class ForwardError(RtpLlmError):
    """A forward pass was given something that it cannot work on."""

    step = "forward"
