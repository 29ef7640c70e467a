"""How weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from rtp_llm.config.kinds import ChoiceKind, Device, FilePath, JsonObject, OptionalChoiceKind, Seconds, Switch, Whole
from rtp_llm.config.setting import make, setting, validate
from rtp_llm.errors import Problem

#: Methods of quantised checkpoints, and those that quantise a plain one.  A test compares the registry with this list.
QUANTIZATION_METHODS = (
    "awq",
    "compressed-tensors",
    "fp8",
    "gptq",
    "modelopt",
    "mxfp4",
    "quark",
    "inline-fp8-tensor",
    "inline-fp8-channel",
    "inline-fp8-block",
)


class StackedMode(Enum):
    """How fastsafetensors delivers tensors that hold all experts of a layer."""

    PER_EXPERT = "per-expert"
    FULL_STACKED = "full-stacked"


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Settings of a load.  Raises ``ConfigError`` with every value that is not allowed."""

    load_method: str = setting(
        ChoiceKind(("auto", "fastsafetensors", "scratch")),
        "auto",
        "How bytes get to the device; auto takes the best way that works here.",
        env="LOAD_METHOD",
    )
    device: str = setting(
        Device(), "auto", "Where weights go; auto takes CUDA where there is a GPU (one for each local rank), else the CPU."
    )
    dtype: str = setting(
        ChoiceKind(("auto", "float64", "float32", "bfloat16", "float16")),
        "auto",
        "Type of the weights on the device; auto keeps config.json's, else the one most bytes are stored in.",
    )
    quantization: str | None = setting(
        OptionalChoiceKind(QUANTIZATION_METHODS),
        None,
        "Quantisation that the checkpoint must have (left out: whatever it declares), or inline-*: what to make of plain weights.",
    )
    kernels: str = setting(
        ChoiceKind(("auto", "flashinfer", "torch")),
        "auto",
        "Who computes norms, gates, rotations and attention; auto takes flashinfer on a CUDA device for what it can do there, else torch.",
        env="KERNELS",
    )
    # More than 256 threads only queue at the disk.
    reader_threads: int = setting(
        Whole(0, 256), 0, "Threads that read files; 0 takes as many as there are CPUs (three quarters of them beside a GPU), at most 12."
    )
    # Buffers far smaller than 4096 MiB already read as fast.
    buffer_mib: int = setting(Whole(1, 4096), 8, "Size of each of a reader thread's staging buffers (two beside a GPU), in MiB.")
    # 128 KiB is the kernel's default read-ahead window: such a gap is read from storage anyway, and copying it from the
    # page cache costs less than a second call.
    read_gap_kib: int = setting(
        Whole(0, 65536),
        128,
        "Unwanted bytes between the rows of a row-parallel matrix that are read rather than skipped, in KiB, where it is not in the page "
        "cache; 0 reads only what is wanted.",
    )
    verify: bool = setting(Switch(), False, "After the load, read the files again and compare every weight with them.")
    progress: bool = setting(Switch(), True, "Show progress on stderr: a bar on a terminal, else a line every few seconds.")
    timeout_s: float = setting(Seconds(86400), 300.0, "Longest wait of a rank for the others wherever ranks meet.")
    stacked_moe_mode: str = setting(
        ChoiceKind(tuple(mode.value for mode in StackedMode)),
        StackedMode.PER_EXPERT.value,
        "How fastsafetensors delivers tensors that hold all experts: one at a time, in bounded memory, or whole.",
        env="RTP_FASTSAFETENSORS_STACKED_MOE_MODE",
    )
    fastsafetensors_config: str | None = setting(
        FilePath(),
        None,
        "JSON file with fastsafetensors' own settings; without it ./fastsafetensors.json, where there is one.",
        env="FASTSAFETENSORS_CONFIG",
    )
    fastsafetensors_config_json: str | None = setting(
        JsonObject(), None, "The same settings as text; used instead of any file.", env="FASTSAFETENSORS_CONFIG_JSON"
    )
    fastsafetensors_nogds: bool = setting(
        Switch(), False, "Never use GPUDirect storage, whatever fastsafetensors' own settings say.", env="FASTSAFETENSORS_NOGDS"
    )
    fastsafetensors_odirect: str = setting(
        ChoiceKind(("auto", "1", "0")),
        "auto",
        "Whether fastsafetensors reads around the page cache; auto asks for each file what is cached.",
        env="FASTSAFETENSORS_ODIRECT",
    )

    def __post_init__(self) -> None:
        validate(self)

    def contradictions(self) -> Iterator[Problem]:
        return iter(())

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> LoadConfig:
        """The settings that ``environ`` (usually ``os.environ``) gives; see ``docs/settings.md`` for the variables."""
        return make(cls, {}, environ)
