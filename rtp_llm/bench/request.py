"""What is to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rtp_llm.checkpoint import Catalog
from rtp_llm.config import LoadConfig, ParallelConfig

#: States of the page cache.
WARM, COLD = "warm", "cold"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What to measure.  ``device``: ``cpu`` or ``cuda:N``; ``states``: of the page cache, in order; ``drop_caches``: may drop the page
    cache of the whole machine."""

    catalog: Catalog
    device: str
    load: LoadConfig
    parallel: ParallelConfig
    contenders: tuple[str, ...]
    runs: int
    states: tuple[str, ...] = (WARM, COLD)
    drop_caches: bool = False
    limits: bool = True

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]

    @property
    def files(self) -> list[Path]:
        return [Path(self.catalog.directory) / f.name for f in self.catalog.files]
