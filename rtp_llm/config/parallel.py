"""Where one process stands in its parallel group."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes and this process's ranks.  World size is ``tp_size * ep_size``; global rank ``ep_rank * tp_size + tp_rank``.

    Weights depend on nothing else.  Raises ``ConfigError`` for sizes below 1 or ranks out of range, all at once.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
