"""Compiles what a checkpoint's model will call, without reading a weight."""

from __future__ import annotations

import os

import torch

from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.loader.device import resolve_device
from rtp_llm.loader.draft import draft
from rtp_llm.loader.kernels import KernelReport, KernelSetup, plan_kernels
from rtp_llm.parallel.groups import groups_at


def warm_up(path: str | os.PathLike[str], parallel: ParallelConfig | None = None, load: LoadConfig | None = None) -> KernelReport:
    """Compiles and loads the kernels that one rank of a checkpoint's model needs, from headers only.

    A later load on the same machine, with the same settings, compiles nothing.  Ranks need the same modules, so one of them
    will do for a host.

    Raises:
        KernelError: kernels that were asked for and cannot be had, or cannot be compiled.
        RtpLlmError: as for :func:`rtp_llm.loader.draft.draft`.
    """
    parallel, load = parallel or ParallelConfig(), load or LoadConfig.from_environment(os.environ)
    device = resolve_device(load.device, 0)
    drafted = draft(path, parallel, load, groups_at(parallel), device.type)
    drafted.plan.raise_for_problems()
    setup = KernelSetup(plan_kernels(drafted.model, getattr(torch, drafted.dtype), load.kernels, device), speaks=True)
    return setup.bind(drafted.model, [setup.wait(lambda: None, must=True)])
