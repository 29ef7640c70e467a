"""Faults of transports."""

from __future__ import annotations

from enum import Enum


class TransportFault(Enum):
    """Faults of reading and placing."""

    FILE_CHANGED = "a file is not what it was when its header was read"
    SHORT_READ = "a file ended before its data did"
    IO_ERROR = "the operating system could not read"
    NOT_AVAILABLE = "a transport that cannot be used here was asked for"
    VERIFY_FAILED = "a loaded weight is not what the file holds"
    LOCK_REFUSED = "memory could not be locked for copies to a GPU"
    INTERNAL = "a transport of rtp-llm does not do what was planned"
