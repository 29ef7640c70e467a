"""Compiles what a checkpoint's model will call, without reading a weight."""

from __future__ import annotations

import os

from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.kernels import KernelReport, KernelSetup, plan_kernels
from rtp_llm.loader.prepare import prepare


def warm_up(path: str | os.PathLike[str], parallel: ParallelConfig | None = None, load: LoadConfig | None = None) -> KernelReport:
    """Compiles and loads the kernels that one rank of a checkpoint's model needs, from headers only.

    A later load on the same machine, with the same settings, compiles nothing.  Ranks need the same modules, so one of them
    will do for a host.

    Raises:
        KernelError: kernels that the settings name and that are missing or cannot be compiled.
        RtpLlmError: as for :func:`rtp_llm.loader.prepare.prepare`.
    """
    load = load or LoadConfig.from_environment(os.environ)
    context = planning_context(path, parallel, load, resolve_device(load.device, 0))
    prepared = prepare(context)
    prepared.plan.raise_for_problems()
    setup = KernelSetup(plan_kernels(prepared.model, prepared.dtype, load.kernels, context.device), speaks=True)
    return setup.bind(prepared.model, [setup.wait(lambda: None, must=True)])
