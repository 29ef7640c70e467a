"""One process's place in its parallel groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rtp_llm.config.faults import ConfigFault
from rtp_llm.config.kinds import FilePath, Whole
from rtp_llm.config.setting import make, setting, validate
from rtp_llm.errors import Problem

#: More ranks than any published deployment of one model uses; a larger number is a typing error.
MOST_RANKS = 4096


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Sizes and this process's ranks.  World size is ``tp_size * ep_size``; global rank ``ep_rank * tp_size + tp_rank``.

    Weights depend on nothing else.  Raises ``ConfigError`` for sizes below 1 or ranks out of range, all at once.
    """

    tp_size: int = setting(Whole(1, MOST_RANKS), 1, "Number of tensor-parallel ranks; under torchrun it is processes / ep_size.")
    tp_rank: int = setting(
        Whole(0, MOST_RANKS - 1),
        0,
        "This process's tensor-parallel rank, from 0; under torchrun it is rank % tp_size.",
        aliases=("--rank",),
    )
    ep_size: int = setting(Whole(1, MOST_RANKS), 1, "Number of tensor-parallel groups; experts are divided between them.")
    ep_rank: int = setting(Whole(0, MOST_RANKS - 1), 0, "This process's expert-parallel rank, from 0; under torchrun it is rank / tp_size.")
    eplb: str | None = setting(
        FilePath(),
        None,
        "JSON file with the table phy2log: the expert that each physical expert copies. Left out: experts are split evenly.",
    )

    def __post_init__(self) -> None:
        validate(self)

    def contradictions(self) -> Iterator[Problem]:
        for kind, size, rank in (("tp", self.tp_size, self.tp_rank), ("ep", self.ep_size, self.ep_rank)):
            if rank >= size:
                what = f"{kind}_rank is out of range for {kind}_size {size}"
                yield Problem(ConfigFault.CONTRADICTION, what, expected=f"0 to {size - 1}", actual=str(rank))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> ParallelConfig:
        """The settings that ``environ`` (usually ``os.environ``) gives; see ``docs/settings.md`` for the variables."""
        return make(cls, {}, environ)
