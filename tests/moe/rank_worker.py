"""What each rank does in the tests of expert parallelism.  Imported anew by every process."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Any

import torch

from rtp_llm import LoadConfig, ParallelConfig, export_checkpoint, load_model


@dataclass(frozen=True)
class Shape:
    """How the processes of a launch stand to each other."""

    tp_size: int
    ep_size: int
    eplb: str | None = None

    def place(self) -> ParallelConfig:
        rank = int(os.environ["RANK"])
        return ParallelConfig(self.tp_size, rank % self.tp_size, self.ep_size, rank // self.tp_size, self.eplb)


class Reads:
    """Counts the bytes that the reader's threads get from files, which do not tell what of them is cached, so that all is read."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._preadv = os.preadv

    def __enter__(self) -> Reads:
        os.preadv = self._counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._preadv

    def _counted(self, *args: Any) -> int:
        if len(args) > 3:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        got = self._preadv(*args)
        self.nbytes += got
        return got


def logits(
    jobs: list[tuple[str, Shape]], ids: torch.Tensor, steps: list[int], device: str = "cpu"
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each checkpoint and shape the logits of one pass, and of one in ``steps`` with a cache."""
    results = []
    for folder, shape in jobs:
        loaded = load_model(folder, device=device, parallel=shape.place())
        model, there = loaded.model, ids.to(loaded.device)
        with torch.inference_mode():
            cache = model.new_cache(len(ids), ids.shape[1])
            stepped = torch.cat([model(part, cache) for part in there.split(steps, dim=1)], dim=1)
            results.append((model(there).cpu(), stepped.cpu()))
    return results


def counted(jobs: list[tuple[str, Shape]], read_gap_kib: int) -> list[tuple[int, int]]:
    """For each checkpoint and shape the bytes that a load planned to read, and those that the system was asked for."""
    results = []
    for folder, shape in jobs:
        with Reads() as reads:
            loaded = load_model(folder, device="cpu", parallel=shape.place(), load=LoadConfig(read_gap_kib=read_gap_kib))
        results.append((loaded.plan.bytes_read, reads.nbytes))
    return results


def export(jobs: list[tuple[str, Shape, str]]) -> None:
    """Loads each checkpoint and writes it back."""
    for folder, shape, out in jobs:
        export_checkpoint(load_model(folder, device="cpu", parallel=shape.place()), out)
