"""How weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rtp_llm.config.kinds import Choice, Device, Nothing, Seconds, Switch, Whole
from rtp_llm.config.setting import make, setting, validate
from rtp_llm.errors import Problem

#: Known, so that nobody takes the refusal for a typing error.
_FASTSAFETENSORS = "loading through fastsafetensors is not available yet; use auto or scratch"
_QUANTIZATION = "quantisation is not supported yet; leave the setting out. Weights are never loaded as if unquantised"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Settings of a load.  Raises ``ConfigError`` with every value that is not allowed."""

    load_method: str = setting(
        Choice(("auto", "scratch"), {"fastsafetensors": _FASTSAFETENSORS}),
        "auto",
        "How bytes get to the device; auto takes the best way that works here.",
        env="LOAD_METHOD",
    )
    device: str = setting(
        Device(), "auto", "Where weights go; auto takes CUDA where there is a GPU (one for each local rank), else the CPU."
    )
    dtype: str = setting(
        Choice(("auto", "float64", "float32", "bfloat16", "float16")),
        "auto",
        "Type of the weights on the device; auto keeps config.json's, else the one most bytes are stored in.",
    )
    quantization: str | None = setting(Nothing(_QUANTIZATION), None, "Quantisation method of the weights.")
    # 256: beyond that, threads only queue at the disk.
    reader_threads: int = setting(Whole(0, 256), 0, "Threads that read files; 0 takes as many as there are CPUs, at most 8.")
    # 4096 MiB a thread is already far beyond where a larger buffer reads faster.
    buffer_mib: int = setting(Whole(1, 4096), 16, "Size of each reader thread's staging buffer, in MiB.")
    verify: bool = setting(Switch(), False, "After the load, read the files again and compare every weight with them.")
    progress: bool = setting(Switch(), True, "Show progress on stderr: a bar on a terminal, else a line every few seconds.")
    timeout_s: float = setting(Seconds(86400), 300.0, "Longest wait of a rank for the others wherever ranks meet.")

    def __post_init__(self) -> None:
        validate(self)

    def contradictions(self) -> Iterator[Problem]:
        return iter(())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LoadConfig:
        """The settings that ``environ`` (usually ``os.environ``) gives; see ``docs/settings.md`` for the variables."""
        return make(cls, {}, environ)
