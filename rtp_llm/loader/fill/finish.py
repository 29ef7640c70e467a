"""After the load: checks values and chooses kernels, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from rtp_llm.errors import Problem
from rtp_llm.layers.quantised import WEIGHT, Quantisable
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.quantization.faults import QuantizationError
from rtp_llm.quantization.forms import Matrix
from rtp_llm.quantization.kernels import choose_kernel
from rtp_llm.quantization.limits import DeferredChecks, holds
from rtp_llm.quantization.scaled import Scaled
from rtp_llm.quantization.scheme import values_of

_log = logging.getLogger("rtp_llm.loader")


def finish(model: nn.Module, plan: LoadPlan) -> None:
    """Checks the values of every quantised weight, and chooses its kernel.

    Checks are queued on the device, and their results are read at once; only layers that fail are checked in detail.

    Raises:
        QuantizationError: every scale that is not a number, every index out of range.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Quantisable) and layer.held]
    checks = DeferredChecks()
    watched = [(layer, seen, limit) for layer in layers for seen, limit in layer.watched(checks)]
    merged = [(matrix.slot, checks.add(*scales)) for layer in layers for matrix, scales in _merged(layer)]
    numbers = checks.read([seen for _, seen, _ in watched] + [seen for _, seen in merged])
    wrong = {id(layer) for (layer, _, limit), found in zip(watched, numbers, strict=False) if not holds(limit, found)}
    problems = [problem for layer in layers if id(layer) in wrong for problem in _problems(layer, plan)]
    if problems:
        raise QuantizationError(problems)
    for (slot, _), scales in zip(merged, numbers[len(watched) :], strict=True):
        _tell_merged(slot, scales)
    for layer in layers:
        _choose(layer)


def _problems(layer: Quantisable, plan: LoadPlan) -> Iterator[Problem]:
    files = {tensor.name: tensor.file for tensor in plan.catalog.tensors}
    for matrix, found in layer.findings():
        source = plan.slots.get(f"{matrix.slot}.{found.tensor}", plan.slots.get(f"{matrix.slot}.weight"))
        tensor = None if source is None else source.raw
        # Names the matrix, where a tensor holds several.
        what = f"{found.what}, in {matrix.slot}" if source is not None and source.ops else found.what
        fix = found.fix or "the checkpoint is damaged, or was written by a program that failed; take it from its source again"
        file = files.get(tensor or "")
        yield Problem(found.fault, what, file, tensor, expected=found.expected, actual=found.actual, fix=fix)


def _choose(layer: Quantisable) -> None:
    held = layer.held.get(WEIGHT)
    if held is None:
        return
    tensors = [layer.tensors(WEIGHT, i) for i in range(len(held.matrices))]
    weight = getattr(layer, held.scheme.forms[0].name).data
    kernel = choose_kernel(held.scheme, held.matrices, tensors, weight)
    if kernel is not None:
        layer.products[WEIGHT] = kernel


def _merged(layer: Quantisable) -> Iterator[tuple[Matrix, list[torch.Tensor]]]:
    """Static input scales (float32) that are merged to their largest, with the first of their matrices."""
    held = layer.held.get(WEIGHT)
    if held is None or not isinstance(held.scheme, Scaled) or held.scheme.static is None or len(held.matrices) < 2:
        return
    name = held.scheme.static.name
    yield held.matrices[0], [values_of(layer.tensors(WEIGHT, i)[name]) for i in range(len(held.matrices))]


def _tell_merged(slot: str, scales: list[float]) -> None:
    """Logs by how much the scales differ."""
    if min(scales) != max(scales):
        ratio = max(scales) / min(scales) if min(scales) > 0 else float("inf")
        _log.info("%s and what runs with it: input scales differ by a factor of %.3g; the largest is used for all", slot, ratio)
