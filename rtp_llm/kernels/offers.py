"""What a back end offers, and what keeps it from fulfilling a need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rtp_llm.kernels.faults import KernelFault
from rtp_llm.kernels.needs import Need, named
from rtp_llm.kernels.symbols import Resolution, Symbol


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``type``: ``cuda`` or ``cpu``; ``capability``: of the GPU, as ``(9, 0)``; ``cuda``: the version that torch was built with,
    ``13.0``, None for a build without it, ROCm's included."""

    type: str
    capability: tuple[int, int] = (0, 0)
    cuda: str | None = None


def device_facts(device: torch.device) -> DeviceFacts:
    """What back ends ask of a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return DeviceFacts(device.type, capability, torch.version.cuda)


@dataclass(frozen=True, slots=True)
class JitModule:
    """A module of kernels that a back end compiles when it is first needed.

    ``generate(*arguments)`` describes it to the compiler; ``load(*arguments)`` is what the back end's own calls load it by, once.
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
class Offer:
    """An operation of a back end: what it calls, and for what it exists.

    ``limit(need)`` says what of a need is beyond it, in words, or nothing; ``modules(need)`` what has to be compiled for it.
    """

    symbols: tuple[Symbol, ...]
    dtypes: frozenset[torch.dtype]
    capability: tuple[int, int]
    limit: Callable[[Any], str] = no_limit
    modules: Callable[[Any], Iterable[JitModule]] = no_modules


@dataclass(frozen=True, slots=True)
class Backend:
    """A back end: its ``offers`` by operation; ``requirement``, by which pip installs the version that they hold for; and
    ``kernels(ops)``, which makes what does each of some operations, once all that it calls has been resolved."""

    name: str
    requirement: str
    offers: Mapping[str, Offer]
    kernels: Callable[[Sequence[str]], Mapping[str, Any]]

    def symbols(self, needs: Iterable[Need]) -> tuple[Symbol, ...]:
        """Everything that these needs would call, what compiles it included; each once."""
        found: dict[Symbol, None] = {}
        for need in needs:
            offer = self.offers.get(need.op)
            if offer is not None:
                found |= dict.fromkeys(offer.symbols)
                if not offer.limit(need) and need.dtype in offer.dtypes:
                    found |= {symbol: None for module in offer.modules(need) for symbol in (module.generate, module.load)}
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Lack:
    """Why a back end does not fulfil a need."""

    fault: KernelFault
    detail: str


def lacks(backend: Backend, need: Need, found: Mapping[Symbol, Resolution], device: DeviceFacts) -> tuple[Lack, ...]:
    """Everything that keeps ``backend`` from fulfilling ``need`` on ``device``, in the order of :class:`KernelFault`."""
    offer = backend.offers.get(need.op)
    if offer is None:
        return (Lack(KernelFault.NOT_OFFERED, f"{backend.name} has no {need.op}"),)
    lack = [_device_lack(offer, device)]
    for symbol in backend.symbols([need]):
        resolution = found.get(symbol)
        if resolution is not None and resolution.fault is not None:
            lack.append(Lack(resolution.fault, resolution.detail))
    if need.dtype not in offer.dtypes:
        lack.append(Lack(KernelFault.DTYPE, f"{named(need.dtype)}, where there is {' and '.join(sorted(map(named, offer.dtypes)))}"))
    beyond = offer.limit(need)
    if beyond:
        lack.append(Lack(KernelFault.SHAPE, beyond))
    return _ordered(one for one in lack if one is not None)


def _device_lack(offer: Offer, device: DeviceFacts) -> Lack | None:
    if device.cuda is None or device.type != "cuda":
        return Lack(KernelFault.NOT_CUDA, f"the device is {device.type if device.type != 'cuda' else 'of ROCm'}")
    if device.capability < offer.capability:
        has, wants = (".".join(map(str, pair)) for pair in (device.capability, offer.capability))
        return Lack(KernelFault.ARCHITECTURE, f"compute capability {has}, from {wants} on")
    return None


def _ordered(lack: Iterable[Lack]) -> tuple[Lack, ...]:
    order = list(KernelFault)
    return tuple(sorted(dict.fromkeys(lack), key=lambda one: order.index(one.fault)))


def unmet(backend: Backend, op: str, found: Mapping[Symbol, Resolution], device: DeviceFacts) -> tuple[Lack, ...]:
    """What keeps an operation from being had on ``device`` for any model; sizes and dtype are taken to be right."""
    offer = backend.offers[op]
    lack = [_device_lack(offer, device)]
    lack += [Lack(r.fault, r.detail) for s in offer.symbols if (r := found.get(s)) is not None and r.fault is not None]
    return _ordered(one for one in lack if one is not None)
