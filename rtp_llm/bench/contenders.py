"""The loaders that are measured: this package's transports, and others, used as their documentation says.

A contender is a row of :data:`CONTENDERS`: a function that loads a checkpoint's weights to a device, and what it needs.  Other
packages are no dependencies; one that is not installed is listed as absent.  ``modules`` are imported before the clock runs.
The tensors that a function returns stay valid.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import metadata
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rtp_llm.bench.checksum import Contents, of_model, of_tensors
from rtp_llm.bench.recorder import Recorder
from rtp_llm.checkpoint import Catalog
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.loader import build_plan, load_model
from rtp_llm.loader.context import reader_limits
from rtp_llm.plan.plan import LoadPlan


@dataclass(frozen=True, slots=True)
class Job:
    """What to load, to which device, and with which settings of ours."""

    catalog: Catalog
    architecture: str
    device: torch.device
    load: LoadConfig
    parallel: ParallelConfig
    recorder: Recorder

    @property
    def files(self) -> list[str]:
        """Paths of the checkpoint's files."""
        return [str(Path(self.catalog.directory) / f.name) for f in self.catalog.files]

    @property
    def cpu(self) -> bool:
        return self.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a load: ``held`` keeps the tensors alive, ``contents(plan)`` gives them to the checksum.

    ``plan`` is the contender's, if it has one.  ``threads``: the number of reader threads that was set; None if none was.
    """

    held: Any
    contents: Callable[[LoadPlan], Contents]
    nbytes: int
    threads: int | None = None
    plan: LoadPlan | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Unavailable(Exception):
    """A contender that is installed, but cannot do this here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One row.  ``package``: the distribution it needs; ``modules``: imported before the clock runs; ``environ``: its environment
    variables; ``devices``: the kinds it loads to."""

    name: str
    what: str
    load: Callable[[Job], Outcome]
    package: str = "rtp-llm"
    modules: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    ours: bool = False

    @property
    def version(self) -> str | None:
        """The installed version; None where the package is absent."""
        if self.ours:
            from rtp_llm.version import __version__

            return __version__
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None

    def absent(self, device_type: str, formats: frozenset[str]) -> str | None:
        """Why it cannot be measured, without importing it; None if it can."""
        missing = [name for name in self.modules if importlib.util.find_spec(name.partition(".")[0]) is None]
        if self.version is None or missing:
            return f"{self.package} is not installed"
        if device_type not in self.devices:
            return f"does not load to {device_type}"
        if not self.ours and formats != {"safetensors"}:
            return "reads safetensors files only"
        return None


def _ours(job: Job, method: str) -> Outcome:
    # Only loading is measured, not compiling or importing kernels.
    load = replace(job.load, load_method=method, device=str(job.device), kernels="torch", progress=False)
    loaded = load_model(job.catalog.directory, parallel=job.parallel, load=load, progress=job.recorder)
    report = loaded.report
    if report.effective_mode != method:
        raise Unavailable(f"falls back to {report.effective_mode}: {report.degraded_reason}")
    threads = reader_limits(load, job.device.type).threads if method == "scratch" else load.reader_threads or None
    facts = {
        "phases": dict(report.phases),
        "slow_path_weights": report.slow_path_weights,
        "bytes_copied": report.bytes_copied,
        "bytes_staging": report.budget.staging,
    }
    return Outcome(loaded, lambda plan: of_model(loaded.model, plan), report.bytes_read, threads, loaded.plan, facts)


def _scratch(job: Job) -> Outcome:
    return _ours(job, "scratch")


def _fastsafetensors_transport(job: Job) -> Outcome:
    return _ours(job, "fastsafetensors")


def _by_name(job: Job, tensors: dict[str, torch.Tensor], threads: int | None = None) -> Outcome:
    """The outcome of a loader that returns tensors by the checkpoint's names.

    On the CPU a tensor that only maps its file is copied, since mapping alone reads nothing.
    """
    if job.cpu:
        mapped = _mapped_ranges(job.files)
        tensors = {name: t.clone() if any(a <= t.data_ptr() < b for a, b in mapped) else t for name, t in tensors.items()}
    # A tied weight has two names and one memory.
    nbytes = sum({t.data_ptr(): t.nbytes for t in tensors.values()}.values())
    return Outcome(tensors, lambda plan: of_tensors(tensors.get, plan), nbytes, threads)


def _mapped_ranges(files: list[str]) -> list[tuple[int, int]]:
    """Addresses at which this process maps ``files`` (proc(5), ``/proc/pid/maps``)."""
    names = {str(Path(file).resolve()) for file in files}
    ranges = []
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, *_, path = line.split(maxsplit=5)
        if path in names:
            start, _, stop = addresses.partition("-")
            ranges.append((int(start, 16), int(stop, 16)))
    return ranges


def _allocated(job: Job) -> dict[str, torch.Tensor]:
    """Memory on the device for every tensor of the checkpoint, like a model's parameters."""
    return {
        t.name: torch.empty(t.shape, dtype=getattr(torch, DTYPES[t.dtype].torch_name or "uint8"), device=job.device)
        for t in job.catalog.tensors
    }


def _safetensors(job: Job) -> Outcome:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for file in job.files:
        tensors |= load_file(file, device=str(job.device))
    return _by_name(job, tensors)


def _safetensors_to(job: Job) -> Outcome:
    from safetensors import safe_open

    tensors = {}
    for path in job.files:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():
                tensors[name] = file.get_tensor(name).to(job.device)
    return _by_name(job, tensors)


def _fastsafetensors(job: Job) -> Outcome:
    from fastsafetensors import AutoLoader

    loader = AutoLoader(None, job.files, device=str(job.device))
    with closing(loader), closing(loader.iterate_weights()) as weights:
        tensors = dict(weights)
    return _by_name(job, tensors)


#: What was fastest on the machine of benchmark/loading.md: chunks that bound device memory, large bounce buffers, many threads.
_CHUNK_BYTES = 2 << 30
_BOUNCE_KIB = 256 << 10
_TUNED_THREADS = 32


def _fastsafetensors_tuned(job: Job) -> Outcome:
    from fastsafetensors import ParallelLoader

    tensors = _allocated(job)
    largest = max((t.nbytes for t in job.catalog.tensors), default=0)
    threads = len(os.sched_getaffinity(0)) if job.cpu else _TUNED_THREADS
    loader = ParallelLoader(
        None,
        job.files,
        use_tqdm_on_load=False,
        device=str(job.device),
        bbuf_size_kb=_BOUNCE_KIB,
        max_threads=threads,
        nogds=True,
        max_batch_bytes=max(_CHUNK_BYTES, largest),
        accumulate_resident=False,
        borrowed_tensors=True,
    )
    with closing(loader), closing(loader.iterate_weights()) as weights:
        for name, tensor in weights:
            tensors[name].copy_(tensor, non_blocking=True)
            if not job.cpu:
                torch.cuda.current_stream().synchronize()  # a borrowed tensor ends with the step
    return _by_name(job, tensors, threads)


def _runai(job: Job) -> Outcome:
    from runai_model_streamer import SafetensorsStreamer

    tensors = {}
    with SafetensorsStreamer() as streamer:
        # In older versions tensors are views of a buffer that the next one overwrites.
        owned = "owned" in signature(streamer.stream_files).parameters
        streamer.stream_files(job.files, device=str(job.device))
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor if owned else tensor.clone()
    return _by_name(job, tensors)


def _instanttensor(job: Job) -> Outcome:
    from instanttensor import safe_open

    with safe_open(job.files, framework="pt", device=job.device.index) as file:
        tensors = dict(file.tensors())
    return _by_name(job, tensors)


def _instanttensor_tuned(job: Job) -> Outcome:
    from instanttensor import safe_open

    tensors = _allocated(job)
    with safe_open(job.files, framework="pt", device=job.device.index, copy=False) as file:
        for name, tensor in file.tensors():
            tensors[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize(job.device)  # its buffer ends with the context
    return _by_name(job, tensors)


def _transformers(job: Job) -> Outcome:
    import transformers

    cls = getattr(transformers, job.architecture, None)
    if cls is None:
        raise Unavailable(f"transformers {transformers.__version__} has no {job.architecture}")
    options: dict[str, Any] = {"dtype": "auto", "local_files_only": True}
    # A device map, which needs accelerate, is the documented way: each tensor goes to the device by itself.
    mapped = not job.cpu and importlib.util.find_spec("accelerate") is not None
    model = cls.from_pretrained(job.catalog.directory, **options, **({"device_map": {"": str(job.device)}} if mapped else {}))
    return _by_name(job, dict(model.to(job.device).state_dict()))


CONTENDERS = (
    Contender("rtp-llm", "this package's own reader (--load_method scratch)", _scratch, ours=True),
    Contender(
        "rtp-llm-fastsafetensors",
        "this package through fastsafetensors (--load_method fastsafetensors)",
        _fastsafetensors_transport,
        modules=("fastsafetensors",),
        package="fastsafetensors",
        ours=True,
    ),
    Contender("safetensors", "load_file to the device", _safetensors, "safetensors", ("safetensors.torch",)),
    Contender(
        "safetensors-to", "safe_open on the host, then .to(device)", _safetensors_to, "safetensors", ("safetensors",), devices=("cuda",)
    ),
    Contender("fastsafetensors", "AutoLoader as it comes", _fastsafetensors, "fastsafetensors", ("fastsafetensors",)),
    Contender(
        "fastsafetensors-tuned",
        "ParallelLoader, borrowed tensors into memory allocated before, buffered reads",
        _fastsafetensors_tuned,
        "fastsafetensors",
        ("fastsafetensors",),
        (("FASTSAFETENSORS_ODIRECT", "0"),),
    ),
    Contender("runai-model-streamer", "SafetensorsStreamer", _runai, "runai-model-streamer", ("runai_model_streamer", "humanize")),
    Contender("instanttensor", "safe_open as it comes", _instanttensor, "instanttensor", ("instanttensor",), devices=("cuda",)),
    Contender(
        "instanttensor-tuned",
        "views copied into memory allocated before, buffered reads",
        _instanttensor_tuned,
        "instanttensor",
        ("instanttensor",),
        (("INSTANTTENSOR_BACKEND", "BUFFERED"),),
        devices=("cuda",),
    ),
    Contender("transformers", "from_pretrained, dtype auto", _transformers, "transformers", ("transformers",)),
)

BY_NAME: Mapping[str, Contender] = MappingProxyType({c.name: c for c in CONTENDERS})

#: Variables that tune other loaders; a contender gets only those of its row.
SCRUBBED = ("FASTSAFETENSORS_", "INSTANTTENSOR_", "RUNAI_STREAMER_")


def plan_of(job: Job, outcome: Outcome) -> LoadPlan:
    """The plan to compare an outcome by; the contender's own if it has one."""
    return outcome.plan or build_plan(job.catalog.directory, job.parallel, replace(job.load, device=job.device.type))
