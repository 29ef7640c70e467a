"""Kernels of a model: chosen before weights are read, compiled while they are read, bound after both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.bind import bind
from rtp_llm.kernels.choose import AUTO, TORCH, KernelChoice, choice_message, choose_kernels, problem
from rtp_llm.kernels.compile import SYMBOLS, Compilation, Compiled, CompileError, check_tools
from rtp_llm.kernels.faults import KernelError
from rtp_llm.kernels.functions import DeviceFacts, JitModule, Unsupported, device_facts, find_unavailable
from rtp_llm.kernels.interface import kernel_needs
from rtp_llm.kernels.needs import KernelNeed
from rtp_llm.kernels.symbols import Resolution, Symbol, resolve_symbols
from rtp_llm.layers.quantised import WEIGHT, Quantisable
from rtp_llm.quantization.kernels import PRODUCTS, ProductNeed, product_need, product_unsupported

_log = logging.getLogger("rtp_llm.loader")

#: Seconds between log lines while only the compiler runs; as often as those about bytes.
_LINE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The back end of each operation; ``needs``: the model's; ``device``: that of the choice."""

    setting: str
    choices: tuple[KernelChoice, ...]
    needs: tuple[KernelNeed, ...]
    device: DeviceFacts

    def lines(self) -> Iterator[str]:
        """A line for each operation on which ranks must agree, equal for equal choices.

        Products on codes depend on the sizes of a rank's own parts.
        """
        ops = {need.op for need in self.needs}
        for choice in (choice for choice in self.choices if choice.op in ops):
            yield f"kernels: {choice.op} by {choice.backend}" + (f" ({choice.fault})" if choice.fault else "")

    def modules(self) -> tuple[JitModule, ...]:
        """The modules to compile, each once."""
        return _modules(self.needs, self.choices)


@dataclass(frozen=True, slots=True)
class KernelReport:
    """The kernels that run; ``compiled`` is None where nothing is compiled."""

    setting: str
    choices: tuple[KernelChoice, ...]
    compiled: Compiled | None = None

    def to_json(self) -> dict[str, Any]:
        """``setting``, ``operations`` and ``compiled``, see docs/json.md."""
        compiled = None
        if self.compiled is not None:
            compiled = {
                "modules": list(self.compiled.modules),
                "fresh": list(self.compiled.fresh),
                "directory": self.compiled.directory,
                "seconds": round(self.compiled.seconds, 4),
            }
        return {"setting": self.setting, "operations": [choice.to_json() for choice in self.choices], "compiled": compiled}


def plan_kernels(model: nn.Module, dtype: torch.dtype, setting: str, device: torch.device) -> KernelPlan:
    """Chooses a back end for each operation of ``model`` (on the meta device, of ``dtype``); compiles and loads nothing.

    A back end is imported only where it may be used, since that takes time; and here, not beside the reading, since an import holds
    the interpreter's lock.

    Raises:
        KernelError: where the setting names a back end, with everything that keeps it from being used.
    """
    needs, facts = kernel_needs(model), device_facts(device)
    on_cuda = facts.type == "cuda" and facts.cuda is not None
    found: dict[Symbol, Resolution] = {}
    if setting != TORCH and (on_cuda or setting != AUTO):
        found = resolve_symbols((*FLASHINFER.symbols(needs), *SYMBOLS))
    plan = KernelPlan(setting, choose_kernels(setting, FLASHINFER, needs, found, facts), needs, facts)
    plan = _compilable(plan, found)
    return replace(plan, choices=(*plan.choices, *_products(model, dtype, device)))


def _products(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[KernelChoice]:
    """The choice for products of quantised layers; layers choose one by one, since sizes differ."""
    needs: list[ProductNeed] = []
    for layer in model.modules():
        held = layer.held.get(WEIGHT) if isinstance(layer, Quantisable) else None
        need = None if held is None else product_need(held.scheme, getattr(layer, held.scheme.forms[0].name).shape, dtype)
        needs += [] if need is None else [need]
    lacking = {need: product_unsupported(need, device) for need in needs}
    first = next((lack[0] for lack in lacking.values() if lack), None)
    able = sum(not lacking[need] for need in needs)
    if able:
        reason = "products on codes" + (f" in {able} of {len(needs)} layers, others are dequantised: {first.detail}" if first else "")
        yield KernelChoice("scaled_mm", PRODUCTS.name, reason)
    elif first is not None:
        yield KernelChoice("scaled_mm", TORCH, f"weights are dequantised: {first.detail}", first.fault.name)


def survey() -> list[tuple[str, str, tuple[str, ...]]]:
    """Every operation of a back end, the back end, and why this machine's first GPU cannot run it."""
    facts = device_facts(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    found = resolve_symbols(s for backend in (FLASHINFER, PRODUCTS) for function in backend.functions.values() for s in function.symbols)
    return [
        (op, backend.name, tuple(lack.detail for lack in find_unavailable(backend, op, found, facts)))
        for backend in (FLASHINFER, PRODUCTS)
        for op in backend.functions
    ]


def _compilable(plan: KernelPlan, found: Mapping[Symbol, Resolution]) -> KernelPlan:
    """The plan, with torch for operations that cannot be compiled here."""
    while (modules := plan.modules()) and plan.device.cuda is not None:
        lack = next((Unsupported(r.fault, r.detail) for s in SYMBOLS if (r := found[s]).fault is not None), None)
        if lack is not None:
            return _without(plan, lack, modules)
        try:
            check_tools(modules, plan.device.cuda)
            break
        except CompileError as error:
            plan = _without(plan, error.unsupported, error.failed)
    return plan


def _without(plan: KernelPlan, lack: Unsupported, failed: Sequence[JitModule]) -> KernelPlan:
    """The plan with torch for every operation that needs one of the modules.

    Raises:
        KernelError: where the setting names the back end.
    """
    ops = _ops_of(plan, failed)
    if plan.setting != AUTO:
        raise KernelError(problem(FLASHINFER, lack, ops))
    return _by_torch(plan, ops, lack.detail, lack.fault.name)


def _by_torch(plan: KernelPlan, ops: Sequence[str], reason: str, fault: str) -> KernelPlan:
    choices = tuple(KernelChoice(c.op, TORCH, reason, fault) if c.op in ops and c.backend == FLASHINFER.name else c for c in plan.choices)
    return replace(plan, choices=choices)


def _ops_of(plan: KernelPlan, modules: Sequence[JitModule]) -> tuple[str, ...]:
    by_op = {choice.op: _modules(plan.needs, [choice]) for choice in plan.choices}
    return tuple(op for op, own in by_op.items() if set(own) & set(modules))


def _modules(needs: Sequence[KernelNeed], choices: Sequence[KernelChoice]) -> tuple[JitModule, ...]:
    ops = {choice.op for choice in choices if choice.backend == FLASHINFER.name}
    found = (module for need in needs if need.op in ops for module in FLASHINFER.functions[need.op].modules(need))
    return tuple(dict.fromkeys(found))


class KernelSetup:
    """Carries out a plan: compiles in the background, and binds at the end."""

    def __init__(self, plan: KernelPlan, speaks: bool) -> None:
        self.plan = plan
        self._speaks = speaks
        if speaks:
            _log.log(*choice_message(plan.setting, FLASHINFER, plan.choices))
        modules = plan.modules()
        self._compilation = Compilation(modules, plan.device.cuda) if modules and plan.device.cuda else None
        self._compiled: Compiled | None = None

    def wait(self, check: Callable[[], None], *, must: bool = False) -> dict[str, Any] | None:
        """Waits for the compiler; returns a message for the other ranks if operations failed here: ``ops``, ``reason``, ``fault``.

        Raises:
            KernelError: where the setting names the back end, or it ``must`` be had, and it cannot be compiled.
        """
        if self._compilation is None:
            return None
        try:
            self._compiled = self._compilation.result(_LINE_SECONDS, self._tell, check)
        except CompileError as error:
            ops = _ops_of(self.plan, error.failed)
            if must or self.plan.setting != AUTO:
                raise KernelError(problem(FLASHINFER, error.unsupported, ops)) from error
            return {"ops": ops, "reason": error.unsupported.detail, "fault": error.unsupported.fault.name}
        return None

    def _tell(self, text: str) -> None:
        if self._speaks:
            _log.info("kernels: %s", text)

    def bind(self, model: nn.Module, messages: Sequence[dict[str, Any] | None]) -> KernelReport:
        """Gives the model its kernels; torch's for operations that failed on any rank, by all ranks' ``messages`` of :meth:`wait`."""
        failed = [message for message in messages if message is not None]
        plan = self.plan
        for one in failed:
            plan = _by_torch(plan, one["ops"], one["reason"], one["fault"])
        if failed and self._speaks:
            _log.log(*choice_message(plan.setting, FLASHINFER, plan.choices))
        ops = [choice.op for choice in plan.choices if choice.backend == FLASHINFER.name]
        bind(model, FLASHINFER.kernels(ops) if ops else {})
        return KernelReport(plan.setting, plan.choices, self._compiled)
