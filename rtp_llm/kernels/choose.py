"""Chooses the back end of each operation: a pure function, with the reasons."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from rtp_llm.errors import Problem
from rtp_llm.kernels.faults import FIXES, KernelError, KernelFault
from rtp_llm.kernels.functions import Backend, DeviceFacts, Unsupported, find_unsupported
from rtp_llm.kernels.needs import KernelNeed
from rtp_llm.kernels.symbols import Resolution, Symbol

AUTO, TORCH = "auto", "torch"

#: Faults of the installation, which a user can repair: under ``auto`` they are logged as warnings.
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
class KernelChoice:
    """The back end of an operation, and why.  ``fault``: the first reason why it is not another back end."""

    op: str
    backend: str
    reason: str
    fault: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)


def choose_kernels(
    setting: str, backend: Backend, needs: Sequence[KernelNeed], found: Mapping[Symbol, Resolution], device: DeviceFacts
) -> tuple[KernelChoice, ...]:
    """A back end for each operation of ``needs``, in their order: ``backend`` if it can do all needs of the operation, else torch.

    Args:
        setting: ``auto``, ``torch``, or the name of ``backend``.
        needs: of all layers of a model.
        found: the back end's resolved symbols; a symbol that is not in it counts as present.

    Raises:
        KernelError: the setting is the back end's name and it cannot do an operation; has all reasons.
    """
    ops = dict.fromkeys(need.op for need in needs)
    if setting == TORCH:
        return tuple(KernelChoice(op, TORCH, "it was asked for") for op in ops)
    unsupported = {op: [(n, reason) for n in needs if n.op == op for reason in find_unsupported(backend, n, found, device)] for op in ops}
    if setting != AUTO and any(unsupported.values()):
        raise KernelError(problems(backend, unsupported))
    why = "it was asked for" if setting != AUTO else "all that it calls is there"
    return tuple(_torch(op, *unsupported[op][0]) if unsupported[op] else KernelChoice(op, backend.name, why) for op in ops)


def _torch(op: str, need: KernelNeed, reason: Unsupported) -> KernelChoice:
    about = f"{need.text}: " if reason.fault in (KernelFault.DTYPE, KernelFault.SHAPE) else ""
    return KernelChoice(op, TORCH, f"{about}{reason.detail}", reason.fault.name)


def problems(backend: Backend, unsupported: Mapping[str, Iterable[tuple[KernelNeed, Unsupported]]]) -> Iterator[Problem]:
    """Every reason why a back end cannot be used, once, with the operations that it concerns."""
    concerned: dict[Unsupported, dict[str, None]] = {}
    for need, reason in (pair for pairs in unsupported.values() for pair in pairs):
        concerned.setdefault(reason, {})[need.text if reason.fault in (KernelFault.DTYPE, KernelFault.SHAPE) else need.op] = None
    for reason, names in concerned.items():
        yield problem(backend, reason, tuple(names))


def problem(backend: Backend, reason: Unsupported, names: Sequence[str]) -> Problem:
    """One reason, as something that a user can put right."""
    return Problem(
        reason.fault,
        f"{backend.name} cannot be used for {', '.join(names)}",
        expected=f"{backend.requirement}, able to do all that the model needs",
        actual=reason.detail,
        fix=FIXES[reason.fault].format(requirement=backend.requirement),
    )


def choice_message(setting: str, backend: Backend, choices: Sequence[KernelChoice]) -> tuple[int, str]:
    """Log level and line about the choices.  Under ``auto``, a broken installation is a warning that says how to repair it."""
    broken = [KernelFault[choice.fault] for choice in choices if choice.fault in {fault.name for fault in _BROKEN}]
    by_cause: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        by_cause.setdefault((choice.backend, choice.reason), []).append(choice.op)
    parts = [f"{backend} for {', '.join(ops)} ({reason})" for (backend, reason), ops in by_cause.items()]
    text = f"kernels {setting}: {'; '.join(parts) or 'none are called'}"
    if not broken or setting != AUTO:
        return logging.INFO, text
    fixes = dict.fromkeys(FIXES[fault].format(requirement=backend.requirement) for fault in broken)
    return logging.WARNING, f"{text}. {'; '.join(fixes)}"
