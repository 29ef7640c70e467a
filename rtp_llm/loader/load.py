"""``load_model``: prepare, agree, select a transport, fill, report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rtp_llm.checkpoint import Catalog
from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.layers.cache import CacheSize
from rtp_llm.loader.budget import reader_pool, select_transport
from rtp_llm.loader.budget.cache import check_cache
from rtp_llm.loader.context import LoadContext, open_context, planning_context
from rtp_llm.loader.fill import fill_parameters
from rtp_llm.loader.fill.verify import verify
from rtp_llm.loader.kernels import KernelSetup, plan_kernels
from rtp_llm.loader.prepare import prepare
from rtp_llm.loader.prepare.prepared import agree_on
from rtp_llm.loader.report import LoadReport
from rtp_llm.models.family import Family
from rtp_llm.parallel.world import World
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.interface import Progress, TransferStats
from rtp_llm.transport.scratch.pool import ReaderPool


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with every parameter in place on its device, its plan, and the report of its load."""

    model: nn.Module
    plan: LoadPlan
    report: LoadReport
    raw_config: Mapping[str, Any]
    family: Family
    device: torch.device
    world: World

    @property
    def catalog(self) -> Catalog:
        """What the checkpoint's headers say."""
        return self.plan.catalog

    @property
    def directory(self) -> str:
        """The checkpoint's directory."""
        return self.catalog.directory


# In any mode of the caller: reader threads, which have a mode of their own, could not write inference tensors.
@torch.inference_mode(False)
def load_model(
    path: str | os.PathLike[str],
    device: str | None = None,
    parallel: ParallelConfig | None = None,
    load: LoadConfig | None = None,
    *,
    progress: Progress | None = None,
    world: World | None = None,
    cache: Callable[[], CacheSize | None] | None = None,
) -> LoadedModel:
    """Loads one rank of a checkpoint.

    The package's front door: each argument is one that callers give by name, hence more than six.

    Args:
        path: a checkpoint directory in Hugging Face's layout.
        device: ``cpu``, ``cuda``, ``cuda:N`` or ``auto``; the setting ``device`` unless given.
        parallel: this process's place.  Left out under ``torchrun``, all its processes form one tensor-parallel group.
            Given where no process group runs, that rank's weights are loaded and checked alone, without a forward pass.
        load: settings; from the environment unless given.
        progress: receives the number of bytes as they arrive.
        world: the processes to meet; found from torchrun's variables unless given.
        cache: returns the size of the KV cache that must fit beside the weights; called first, and its errors reach all ranks.

    Returns:
        The model: ``model(input_ids)`` gives logits ``[batch, seq, vocab]`` for causal models, the last hidden state
        ``[batch, seq, hidden]`` for encoders.

    Raises:
        RtpLlmError: a subclass for whatever is wrong; nothing half-loaded is returned.  With several ranks, all of them
            raise the first rank's error.
    """
    settings = load or LoadConfig.from_environment(os.environ)
    with open_context(path, device, parallel, settings, progress, world) as context:
        size = None if cache is None else cache()
        with reader_pool(context) as pool:
            return _load(context, size, pool)


def _load(context: LoadContext, cache: CacheSize | None, pool: ReaderPool[TransferStats] | None) -> LoadedModel:
    clock, watch = context.clock, context.watch
    with clock.phase("plan"):
        prepared = prepare(context)
        prepared.plan.raise_for_problems()
        kernels = plan_kernels(prepared.model, prepared.dtype, context.settings.kernels, context.device)
    with clock.phase("agree"):
        agree_on(context, prepared, tuple(kernels.lines()))
    with clock.phase("choose"):
        selected = select_transport(context, prepared, pool)
        if cache is not None:
            check_cache(context, cache, prepared)
    setup = KernelSetup(kernels, context.world.rank == 0)
    filled = fill_parameters(context, prepared, selected)
    verified = None
    if context.settings.verify:
        with clock.phase("verify"):
            verified = verify(prepared.model, prepared.plan)
    with clock.phase("compile"):
        failed = setup.wait(watch.check)
    with clock.phase("close"):
        bound = setup.bind(prepared.model, watch.all_gather_json(failed))
    report = LoadReport.of(context, prepared.plan, filled, kernels=bound, verified=verified)
    model = prepared.model.eval()
    return LoadedModel(model, prepared.plan, report, prepared.raw_config, prepared.family, context.device, context.world)


def build_plan(path: str | os.PathLike[str], parallel: ParallelConfig | None = None, load: LoadConfig | None = None) -> LoadPlan:
    """The plan of one rank, from headers only; nothing is allocated, and other ranks take no part.

    ``problems``, ``missing`` and ``unexpected`` are filled where the checkpoint does not fit the model;
    ``plan.raise_for_problems()`` makes an error of them.  Other errors as in :func:`rtp_llm.loader.prepare.prepare`.
    """
    return prepare(planning_context(path, parallel, load)).plan
