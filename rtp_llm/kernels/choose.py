"""Which back end does which operation: one pure decision, with its reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rtp_llm.errors import Problem
from rtp_llm.kernels.faults import FIXES, KernelError, KernelFault
from rtp_llm.kernels.needs import Need
from rtp_llm.kernels.offers import Backend, DeviceFacts, Lack, lacks
from rtp_llm.kernels.symbols import Resolution, Symbol

AUTO, TORCH = "auto", "torch"

#: What is no property of model or machine but something to repair; it deserves a warning where nobody asked for the back end.
_BROKEN = frozenset(
    {
        KernelFault.IMPORT_FAILED,
        KernelFault.SYMBOL_MISSING,
        KernelFault.SIGNATURE,
        KernelFault.NO_COMPILER,
        KernelFault.COMPILE_FAILED,
        KernelFault.OTHER_CUDA,
    }
)


@dataclass(frozen=True, slots=True)
class Choice:
    """Who does an operation, and why; ``fault`` is the first thing that keeps another back end from it."""

    op: str
    backend: str
    reason: str
    fault: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)


def choose(
    setting: str, backend: Backend, needs: Sequence[Need], found: Mapping[Symbol, Resolution], device: DeviceFacts
) -> tuple[Choice, ...]:
    """A back end for each operation of ``needs``, in their order: ``backend`` where it fulfils every need of it, else torch.

    Args:
        setting: ``auto``, ``torch``, or the name of ``backend``.
        needs: of all layers of a model.
        found: what became of the back end's symbols; those that were not looked for are taken to be there.

    Raises:
        KernelError: where the setting is the back end's name, with everything that keeps it from any operation.
    """
    ops = dict.fromkeys(need.op for need in needs)
    if setting == TORCH:
        return tuple(Choice(op, TORCH, "it was asked for") for op in ops)
    lacking = {op: [(n, lack) for n in needs if n.op == op for lack in lacks(backend, n, found, device)] for op in ops}
    if setting != AUTO and any(lacking.values()):
        raise KernelError(problems(backend, lacking))
    why = "it was asked for" if setting != AUTO else "all that it calls is there"
    return tuple(_torch(op, *lacking[op][0]) if lacking[op] else Choice(op, backend.name, why) for op in ops)


def _torch(op: str, need: Need, lack: Lack) -> Choice:
    about = f"{need.text}: " if lack.fault in (KernelFault.DTYPE, KernelFault.SHAPE) else ""
    return Choice(op, TORCH, f"{about}{lack.detail}", lack.fault.name)


def problems(backend: Backend, lacking: Mapping[str, Iterable[tuple[Need, Lack]]]) -> Iterator[Problem]:
    """Everything that keeps a back end from being used, each reason once, with the operations that it concerns."""
    concerned: dict[Lack, dict[str, None]] = {}
    for need, lack in (pair for pairs in lacking.values() for pair in pairs):
        concerned.setdefault(lack, {})[need.text if lack.fault in (KernelFault.DTYPE, KernelFault.SHAPE) else need.op] = None
    for lack, names in concerned.items():
        yield problem(backend, lack, tuple(names))


def problem(backend: Backend, lack: Lack, names: Sequence[str]) -> Problem:
    """One reason, as something that a user can put right."""
    return Problem(
        lack.fault,
        f"{backend.name} cannot be used for {', '.join(names)}",
        expected=f"{backend.requirement}, able to do all that the model needs",
        actual=lack.detail,
        fix=FIXES[lack.fault].format(requirement=backend.requirement),
    )


def told(setting: str, backend: Backend, choices: Sequence[Choice]) -> tuple[int, str]:
    """The decision for the log: its level, and one line; with what to do, where something is broken that nobody asked for."""
    broken = [KernelFault[choice.fault] for choice in choices if choice.fault in {fault.name for fault in _BROKEN}]
    by_reason: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        by_reason.setdefault((choice.backend, choice.reason), []).append(choice.op)
    parts = [f"{backend} for {', '.join(ops)} ({reason})" for (backend, reason), ops in by_reason.items()]
    text = f"kernels {setting}: {'; '.join(parts) or 'none are called'}"
    if not broken or setting != AUTO:
        return logging.INFO, text
    fixes = dict.fromkeys(FIXES[fault].format(requirement=backend.requirement) for fault in broken)
    return logging.WARNING, f"{text}. {'; '.join(fixes)}"
