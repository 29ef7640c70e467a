"""Compares every weight with what another reader finds in the files: safetensors' own, or torch's."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from safetensors import safe_open
from torch import nn

from rtp_llm.checkpoint.torch_file import nesting_keys
from rtp_llm.errors import Problem, TransportError
from rtp_llm.loader.context import step_bytes
from rtp_llm.plan.boxes import Box, extent, view, whole
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.faults import TransportFault


def verify(model: nn.Module, plan: LoadPlan) -> int:
    """Compares every place of every parameter, bit for bit, with the content that a second reader finds.

    The reader holds one whole tensor at a time in host memory.

    Returns:
        The number of places compared.

    Raises:
        TransportError: listing every place that differs.
    """
    params = dict(model.named_parameters())
    by_file: defaultdict[str, list[Delivery]] = defaultdict(list)
    for delivery in plan.deliveries:
        by_file[delivery.tensor.file].append(delivery)
    formats = {f.name: f.format for f in plan.catalog.files}
    problems, compared = [], 0
    for file, deliveries in by_file.items():
        with _opened(os.path.join(plan.catalog.directory, file), formats[file]) as get:
            for delivery in deliveries:
                source, slot = delivery.source, whole(delivery.source.slot_shape)
                tensor = source.apply(view(get(delivery.tensor.name), source.pull(slot)), slot)
                wanted = view(tensor, delivery.slot_box)
                for param, box, content in _places(delivery, plan, params, wanted):
                    compared += 1
                    found = view(params[param].data, box).cpu()
                    if not _same(found, content.reshape(found.shape).to(found.dtype)):
                        problems.append(_differs(delivery, param))
    if problems:
        raise TransportError(problems)
    return compared


def _places(
    delivery: Delivery, plan: LoadPlan, params: Mapping[str, nn.Parameter], content: torch.Tensor
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """Every place that a delivery fills, with its expected content, transformed where the parameter is derived."""
    for target in delivery.targets:
        derived = plan.derived.get(target.param)
        if derived is None:
            yield target.param, target.box, content
            continue
        memory = [torch.empty(extent(p.box), dtype=params[p.param].dtype) for p in derived.places]
        places = [(p.output, p.box, m) for p, m in zip(derived.places, memory, strict=True)]
        derived.transform.derive(content.contiguous(), derived.region, places, step_bytes("cpu"))
        for place, output in zip(derived.places, memory, strict=True):
            yield place.param, place.local_box, output


@contextmanager
def _opened(path: str, format: str) -> Iterator[Callable[[str], torch.Tensor]]:
    """A function that gets a tensor of the file by name."""
    if format == "torch":
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        for key in nesting_keys(state):
            state = state[key]
        yield state.__getitem__
        return
    with safe_open(path, framework="pt", device="cpu") as file:
        yield file.get_tensor


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, so that NaN equals itself and 0.0 is not -0.0."""
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _differs(delivery: Delivery, param: str) -> Problem:
    return Problem(
        TransportFault.VERIFY_FAILED,
        f"{param} does not hold what the file holds",
        file=delivery.tensor.file,
        tensor=delivery.tensor.name,
        expected="equal bits",
        actual="other bits",
        fix="the file changed while it was loaded, or memory or disk is faulty; load again",
    )
