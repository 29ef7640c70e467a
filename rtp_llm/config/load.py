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
        "How bytes get to the device; auto takes the best method that works here.",
        env="LOAD_METHOD",
    )
    device: str = setting(
        Device(), "auto", "Device of the weights; auto takes a GPU (one for each local rank), or the CPU if there is none."
    )
    dtype: str = setting(
        ChoiceKind(("auto", "float64", "float32", "bfloat16", "float16")),
        "auto",
        "Dtype of the weights on the device; auto keeps config.json's, or else the one that most bytes are stored in.",
    )
    quantization: str | None = setting(
        OptionalChoiceKind(QUANTIZATION_METHODS),
        None,
        "Quantisation that the checkpoint must declare; inline-* quantises plain weights. Left out: what it declares.",
    )
    kernels: str = setting(
        ChoiceKind(("auto", "flashinfer", "torch")),
        "auto",
        "Back end of norms, gates, rotations and attention; auto takes flashinfer for what it can do on a CUDA device, else torch.",
        env="KERNELS",
    )
    # More than 256 threads only queue at the disk.
    reader_threads: int = setting(
        Whole(0, 256), 0, "Threads that read files; 0 takes the number of CPUs (three quarters of it beside a GPU), at most 12."
    )
    # 4096 MiB a thread is already far beyond where a larger buffer reads faster.
    buffer_mib: int = setting(Whole(1, 4096), 8, "MiB of one staging buffer; a reader thread has one (two beside a GPU).")
    # 128 KiB is the kernel's default read-ahead window: such a gap is fetched from storage anyway, and in the page cache
    # reading past it costs less than a second call.
    read_gap_kib: int = setting(
        Whole(0, 65536),
        128,
        "Largest gap, in KiB, between the rows of an uncached row-parallel matrix that is read over and not skipped; 0 skips all.",
    )
    verify: bool = setting(Switch(), False, "After the load, read the files again and compare every weight with them.")
    progress: bool = setting(Switch(), True, "Show progress on stderr: a bar on a terminal, else a line every few seconds.")
    timeout_s: float = setting(Seconds(86400), 300.0, "Longest time that a rank waits for the others.")
    stacked_moe_mode: str = setting(
        ChoiceKind(tuple(mode.value for mode in StackedMode)),
        StackedMode.PER_EXPERT.value,
        "How fastsafetensors delivers a tensor that holds all experts: expert by expert, in bounded memory, or whole.",
        env="RTP_FASTSAFETENSORS_STACKED_MOE_MODE",
    )
    fastsafetensors_config: str | None = setting(
        FilePath(),
        None,
        "JSON file with fastsafetensors' own settings. Left out: ./fastsafetensors.json, if there is one.",
        env="FASTSAFETENSORS_CONFIG",
    )
    fastsafetensors_config_json: str | None = setting(
        JsonObject(), None, "The same settings as text; used instead of any file.", env="FASTSAFETENSORS_CONFIG_JSON"
    )
    fastsafetensors_nogds: bool = setting(
        Switch(), False, "Never use GPUDirect storage, even if fastsafetensors' own settings ask for it.", env="FASTSAFETENSORS_NOGDS"
    )
    fastsafetensors_odirect: str = setting(
        ChoiceKind(("auto", "1", "0")),
        "auto",
        "Whether fastsafetensors bypasses the page cache; auto decides per file, by what is cached.",
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
