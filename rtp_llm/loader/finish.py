"""After the load: values are checked and kernels chosen, layer by layer."""

from __future__ import annotations

import logging

import torch
from torch import nn

from rtp_llm.errors import Problem
from rtp_llm.layers.quantised import WEIGHT, Quantisable
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.quantization.faults import QuantizationError
from rtp_llm.quantization.kernels import choose_kernel
from rtp_llm.quantization.scaled import Scaled

_log = logging.getLogger("rtp_llm.loader")

#: What checking one value takes at most: a float32 copy, its absolute value or comparison, and a mask.
_BYTES_A_VALUE = 12


def finish_bytes(model: nn.Module) -> int:
    """The most that :func:`finish` takes beside the parameters, on the device: for the largest tensor that is checked.

    Codes of eight bits are not looked at one by one; what is checked is scales, indices, and codes of fewer bits.
    """
    most = 0
    for layer in model.modules():
        if isinstance(layer, Quantisable):
            for held in layer.held.values():
                narrow = isinstance(held.scheme, Scaled) and held.scheme.bits < 8
                for laid in held.laid.values():
                    if laid.form is not held.scheme.forms[0] or narrow:
                        most = max(most, max(_volume(box) for box in laid.boxes))
    return _BYTES_A_VALUE * most


def _volume(box: tuple[tuple[int, int], ...]) -> int:
    n = 1
    for a, b in box:
        n *= b - a
    return n


def finish(model: nn.Module, plan: LoadPlan) -> None:
    """Checks the values of every quantised weight, and chooses what its products run on.

    Raises:
        QuantizationError: every scale that is no number, every index out of range.
    """
    problems: list[Problem] = []
    raw = {slot: source.raw for slot, source in plan.slots.items()}
    files = {tensor.name: tensor.file for tensor in plan.tensors} if plan.quantization is not None else {}
    for layer in model.modules():
        if not isinstance(layer, Quantisable) or not layer.held:
            continue
        for matrix, found in layer.findings():
            tensor = raw.get(f"{matrix.slot}.{found.tensor}", raw.get(f"{matrix.slot}.weight"))
            fix = found.fix or "the checkpoint is damaged, or was written by a program that failed; take it from its source again"
            file = files.get(tensor or "")
            problems.append(Problem(found.fault, found.what, file, tensor, expected=found.expected, actual=found.actual, fix=fix))
        if not problems:
            _choose(layer)
    if problems:
        raise QuantizationError(problems)


def _choose(layer: Quantisable) -> None:
    held = layer.held.get(WEIGHT)
    if held is None:
        return
    tensors = [layer.tensors(WEIGHT, i) for i in range(len(held.matrices))]
    _tell_merged(held.scheme, held.matrices[0].slot, tensors)
    weight = getattr(layer, held.scheme.forms[0].name).data
    kernel = choose_kernel(held.scheme, held.matrices, tensors, weight)
    if kernel is not None:
        layer.products[WEIGHT] = kernel


def _tell_merged(scheme: object, slot: str, tensors: list[dict[str, torch.Tensor]]) -> None:
    """Says by how much the scales of static activations differ that are merged to their largest."""
    if not isinstance(scheme, Scaled) or scheme.static is None or len(tensors) < 2:
        return
    scales = [float(parts[scheme.static.name].float()) for parts in tensors]
    if min(scales) != max(scales):
        ratio = max(scales) / min(scales) if min(scales) > 0 else float("inf")
        _log.info("%s and what runs with it: input scales differ by a factor of %.3g; the largest is used for all", slot, ratio)
