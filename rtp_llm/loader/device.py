"""Which device a rank loads to."""

from __future__ import annotations

import torch

from rtp_llm.config.faults import ConfigFault
from rtp_llm.errors import ConfigError, Problem


def resolve_device(name: str, local_rank: int) -> torch.device:
    """The torch device for a setting: ``auto`` and ``cuda`` take the GPU of this local rank (ranks share GPUs
    where there are fewer of them).

    Raises:
        ConfigError: CUDA is named and not there, or a device number does not exist.
    """
    kind, _, number = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cpu" or (kind == "auto" and not count):
        return torch.device("cpu")
    index = int(number) if number else local_rank % max(count, 1)
    if index >= count:
        raise ConfigError(
            Problem(
                ConfigFault.NOT_SUPPORTED,
                f"device {name} is not there",
                expected=f"cpu, or one of {count} CUDA devices" if count else "cpu: torch sees no CUDA device",
                actual=name,
                fix="see rtp-llm doctor for what torch finds",
            )
        )
    return torch.device("cuda", index)
