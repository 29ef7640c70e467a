"""Fills the parameters of a model by the transport that was selected."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass

import torch
from torch import nn

from rtp_llm.errors import TransportError, internal
from rtp_llm.loader.budget import SelectedTransport, fall_back
from rtp_llm.loader.budget.memory import PeakMeter
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.fill.derive import DerivingPlacement
from rtp_llm.loader.fill.finish import finish
from rtp_llm.loader.fill.placement import allocate
from rtp_llm.loader.prepare import Prepared
from rtp_llm.plan.budget import staging_limits
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.fastsafetensors.failure import FastsafetensorsFailure
from rtp_llm.transport.fastsafetensors.probe import Tier
from rtp_llm.transport.faults import TransportFault
from rtp_llm.transport.interface import TransferStats
from rtp_llm.transport.policy import SCRATCH

_log = logging.getLogger("rtp_llm.loader")


@dataclass(frozen=True, slots=True)
class Filled:
    """The transport that filled the parameters, its stats, and the measured peak in bytes (None where the system does not report it)."""

    selected: SelectedTransport
    moved: TransferStats
    peak_bytes: int | None


def fill_parameters(context: LoadContext, prepared: Prepared, selected: SelectedTransport) -> Filled:
    """Allocates the parameters, fills them, and checks their values.

    Falls back to the own reader if fastsafetensors fails.

    Raises:
        TransportError: I/O errors, files that changed, or a transport that did not place what was planned.
        QuantizationError: every scale that is no number, every index out of range.
    """
    plan, clock = prepared.plan, context.clock
    with PeakMeter(context.device) as meter:
        with clock.phase("allocate"):
            params = allocate(prepared.model, plan, context.device)
        with clock.phase("transport"):
            reason = ""
            try:
                moved = _deliver(context, prepared, selected, params)
            except FastsafetensorsFailure as failure:
                reason = str(failure)
            if reason:
                # Parameters keep their memory and are written again.  Everything else of the attempt is freed first, with the
                # frames of its traceback, and cycles among threads and generators.
                gc.collect()
                selected = fall_back(context, prepared, selected, reason)
                moved = _deliver(context, prepared, selected, params)
        if moved.slow_path and selected.decision.method != SCRATCH:
            _log.warning("slow path: %d of %d weights were fetched one by one", moved.slow_path, len(plan.deliveries))
        check_placed(moved, plan)
        with clock.phase("finish"):
            finish(prepared.model, plan)
    return Filled(selected, moved, meter.peak_bytes)


def _deliver(context: LoadContext, prepared: Prepared, selected: SelectedTransport, params: dict[str, nn.Parameter]) -> TransferStats:
    # A load in chunks has one thread, which could only wait for itself.  The own reader has several; it also fetches what whole files lack.
    in_chunks = selected.decision.method != SCRATCH and selected.tier is Tier.BOUNDED
    limit = None if in_chunks else staging_limits(prepared.plan, context.reader).parts
    sink, progress = DerivingPlacement(params, prepared.plan, limit), context.progress
    progress.start(prepared.plan.bytes_read)
    try:
        moved = selected.transport.deliver(prepared.plan, sink, progress, context.watch.check)
        if context.device.type == "cuda":
            torch.cuda.synchronize(context.device)
    finally:
        progress.stop()
    return moved


def check_placed(moved: TransferStats, plan: LoadPlan) -> None:
    """Refuses a model of which a transport has placed more or less than was planned.

    Raises:
        TransportError: ``INTERNAL``.
    """
    if moved.bytes_placed != plan.bytes_read:
        what = "the transport did not place the bytes that were planned"
        raise TransportError(internal(TransportFault.INTERNAL, what, expected=plan.bytes_read, actual=moved.bytes_placed))
