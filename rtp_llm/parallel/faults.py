"""Faults between ranks."""

from __future__ import annotations

from enum import Enum


class ParallelFault(Enum):
    """Faults of the parallel group."""

    INDIVISIBLE = "a size cannot be divided over the ranks"
    NO_PROCESS_GROUP = "a step needs ranks that were not started"
    BAD_ENVIRONMENT = "the launcher's environment and the settings contradict each other"
    RANKS_DISAGREE = "ranks planned different loads, or were given different prompts"
    RANK_FAILED = "another rank failed"
    RANK_LOST = "another rank died or stopped answering"
    NO_EXPERTS = "expert parallelism was asked of a model without experts"
    TOO_MANY_EXPERT_RANKS = "there are more expert-parallel ranks than experts"
    BAD_EXPERT_TABLE = "a table of physical experts does not fit the model or the ranks"
    INTERNAL = "ranks of rtp-llm are given what they cannot share"
