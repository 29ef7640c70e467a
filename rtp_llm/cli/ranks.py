"""Whether a launcher started this process as one of several ranks, read without importing torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from rtp_llm.config import ConfigFault
from rtp_llm.config.parallel import MOST_RANKS
from rtp_llm.errors import ConfigError, Problem


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's global rank, and how many there are."""

    rank: int
    size: int


def launched(environ: Mapping[str, str]) -> Launch | None:
    """What torchrun's ``RANK`` and ``WORLD_SIZE`` say; None where neither is set.

    Raises:
        ConfigError: one without the other, or values that are not ranks.
    """
    texts = {name: environ.get(name, "").strip() for name in ("RANK", "WORLD_SIZE")}
    if not any(texts.values()):
        return None
    numbers = {name: int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1 for name, text in texts.items()}
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < world <= MOST_RANKS:
        problem = Problem(
            ConfigFault.BAD_VALUE,
            "the launcher's environment is not one of a rank",
            expected=f"0 <= RANK < WORLD_SIZE <= {MOST_RANKS}",
            actual=f"RANK={texts['RANK']!r} WORLD_SIZE={texts['WORLD_SIZE']!r}",
            fix="start with torchrun, or unset both",
        )
        raise ConfigError(problem)
    return Launch(rank, world)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this process prints results: rank 0, or a process with an invalid environment."""
    try:
        launch = launched(environ)
    except ConfigError:
        return True
    return launch is None or launch.rank == 0


def leave_group() -> None:
    """Leaves the process group, if any: NCCL warns about ranks that exit without.

    Looks torch up instead of importing it, since most commands do not need it.
    """
    if in_group():
        sys.modules["torch.distributed"].destroy_process_group()


def in_group() -> bool:
    """Whether this process has joined a process group."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def end_rank(code: int) -> NoReturn:
    """Ends a rank's process at once, after all output.

    A normal exit may be aborted by gloo's threads, with another exit code; leaving the group first may wait for ranks that
    are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
