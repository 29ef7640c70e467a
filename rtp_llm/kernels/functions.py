"""The kernel functions of a back end, and why one cannot do what a layer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_llm.kernels.faults import KernelFault
from rtp_llm.kernels.needs import KernelNeed, named
from rtp_llm.kernels.symbols import Resolution, Symbol


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``type``: ``cuda`` or ``cpu``.  ``capability``: the GPU's compute capability, as ``(9, 0)``.  ``cuda``: the version that torch
    was built with, as ``13.0``; None for a build without CUDA (ROCm has none)."""

    type: str
    capability: tuple[int, int] = (0, 0)
    cuda: str | None = None


def device_facts(device: torch.device) -> DeviceFacts:
    """What back ends ask of a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return DeviceFacts(device.type, capability, torch.version.cuda)


@dataclass(frozen=True, slots=True)
class JitModule:
    """A module of kernels that a back end compiles when it is first used.

    ``generate(*arguments)`` describes it to the compiler.  ``load(*arguments)`` loads it, as the back end's own calls do, once.
    """

    generate: Symbol
    load: Symbol
    arguments: tuple[Any, ...] = ()


def no_limit(need: Any) -> str:
    """An operation that exists for all sizes."""
    return ""


def no_modules(need: Any) -> Iterable[JitModule]:
    """An operation that needs no compiler."""
    return ()


def no_kernels(ops: Sequence[str]) -> Mapping[str, Any]:
    """A back end whose operations layers call by themselves."""
    return {}


@dataclass(frozen=True, slots=True)
class KernelFunction:
    """An operation of a back end: the symbols it calls, and the dtypes and GPUs that it supports.

    ``limit(need)`` is a message if the sizes are not supported, else empty.  ``modules(need)`` are the modules to compile.
    """

    symbols: tuple[Symbol, ...]
    dtypes: frozenset[torch.dtype]
    capability: tuple[int, int]
    limit: Callable[[Any], str] = no_limit
    modules: Callable[[Any], Iterable[JitModule]] = no_modules


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end and its ``functions``, by operation.  ``requirement``: what pip installs to get the version they hold for.
    ``kernels(ops)`` makes the object that does each operation; all symbols must be resolved before."""

    name: str
    requirement: str
    functions: Mapping[str, KernelFunction]
    kernels: Callable[[Sequence[str]], Mapping[str, Any]]

    def symbols(self, needs: Iterable[KernelNeed]) -> tuple[Symbol, ...]:
        """Every symbol that these needs call, with those that compile modules; each once."""
        found: dict[Symbol, None] = {}
        for need in needs:
            function = self.functions.get(need.op)
            if function is not None:
                found |= dict.fromkeys(function.symbols)
                if not function.limit(need) and need.dtype in function.dtypes:
                    found |= {symbol: None for module in function.modules(need) for symbol in (module.generate, module.load)}
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Unsupported:
    """One reason why a back end cannot do what a layer needs."""

    fault: KernelFault
    detail: str


def find_unsupported(
    backend: Backend, need: KernelNeed, found: Mapping[Symbol, Resolution], device: DeviceFacts
) -> tuple[Unsupported, ...]:
    """Every reason why ``backend`` cannot do ``need`` on ``device``, in the order of :class:`KernelFault`."""
    function = backend.functions.get(need.op)
    if function is None:
        return (Unsupported(KernelFault.NOT_OFFERED, f"{backend.name} has no {need.op}"),)
    reasons = [_device_unsupported(function, device)]
    for symbol in backend.symbols([need]):
        resolution = found.get(symbol)
        if resolution is not None and resolution.fault is not None:
            reasons.append(Unsupported(resolution.fault, resolution.detail))
    if need.dtype not in function.dtypes:
        reasons.append(
            Unsupported(KernelFault.DTYPE, f"{named(need.dtype)}, where there is {' and '.join(sorted(map(named, function.dtypes)))}")
        )
    beyond = function.limit(need)
    if beyond:
        reasons.append(Unsupported(KernelFault.SHAPE, beyond))
    return _ordered(reason for reason in reasons if reason is not None)


def _device_unsupported(function: KernelFunction, device: DeviceFacts) -> Unsupported | None:
    if device.cuda is None or device.type != "cuda":
        return Unsupported(KernelFault.NOT_CUDA, f"the device is {device.type if device.type != 'cuda' else 'of ROCm'}")
    if device.capability < function.capability:
        has, wants = (".".join(map(str, pair)) for pair in (device.capability, function.capability))
        return Unsupported(KernelFault.ARCHITECTURE, f"compute capability {has}, from {wants} on")
    return None


def _ordered(reasons: Iterable[Unsupported]) -> tuple[Unsupported, ...]:
    order = list(KernelFault)
    return tuple(sorted(dict.fromkeys(reasons), key=lambda reason: order.index(reason.fault)))


def find_unavailable(backend: Backend, op: str, found: Mapping[Symbol, Resolution], device: DeviceFacts) -> tuple[Unsupported, ...]:
    """Every reason why no model can use an operation on ``device``; sizes and dtype are not looked at."""
    function = backend.functions[op]
    reasons = [_device_unsupported(function, device)]
    reasons += [Unsupported(r.fault, r.detail) for s in function.symbols if (r := found.get(s)) is not None and r.fault is not None]
    return _ordered(reason for reason in reasons if reason is not None)
