"""The one way in which this package tells a user what is wrong.

Every package has an enumeration of faults (``CheckpointFault``, ``PlanFault``, ...), whose values are one line
of explanation each.  A :class:`Problem` is one finding; an :class:`RtpLlmError` carries all findings of a step,
sorted, so that a user never has to repair a checkpoint one message at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

#: How many findings a message spells out; ``problems`` and JSON always hold all of them.  More than a screen of
#: lines hides the first one, which is the one people read.
MESSAGE_LIMIT = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: what, where (file, tensor, rank), expected, actual, and what to do about it.

    ``fault`` is a member of the enumeration of the package that found it; on a problem received from another rank
    it is the member's name as a string.
    """

    fault: Enum | str
    what: str
    file: str | None = None
    tensor: str | None = None
    rank: int | None = None
    expected: str | None = None
    actual: str | None = None
    fix: str | None = None

    @property
    def code(self) -> str:
        """The fault's stable name, e.g. ``TRUNCATED_FILE``."""
        return self.fault.name if isinstance(self.fault, Enum) else self.fault

    def sort_key(self) -> tuple[str, str, str, int, str]:
        return (self.code, self.file or "", self.tensor or "", -1 if self.rank is None else self.rank, self.what)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the keys ``fault, what, file, tensor, rank, expected, actual, fix``."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"fault": self.code}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        return cls(**data)

    def __str__(self) -> str:
        where = [
            f"{label} {value}" for label, value in (("rank", self.rank), ("file", self.file), ("tensor", self.tensor)) if value is not None
        ]
        text = f"{self.code}: {self.what}"
        if where:
            text += f" ({', '.join(where)})"
        if self.expected is not None or self.actual is not None:
            text += f": expected {self.expected}, found {self.actual}"
        if self.fix:
            text += f". {self.fix}"
        return text


#: The name of the fault, in every package's enumeration, that is a mistake in this project.
INTERNAL = "INTERNAL"


def internal(fault: Enum, what: str, *, tensor: str | None = None, expected: object = None, actual: object = None) -> Problem:
    """A promise to the user that this project itself did not keep.  ``fault`` is a package's ``INTERNAL``."""
    fix = "this is a defect of rtp-llm, not of the checkpoint: please report it with this message"
    wanted, found = (None if value is None else str(value) for value in (expected, actual))
    return Problem(fault, what, tensor=tensor, expected=wanted, actual=found, fix=fix)


class RtpLlmError(ValueError):
    """Something the user can put right (input, settings, or the machine) or report (``INTERNAL``).  ``problems`` holds every finding."""

    #: What the step that failed is called in the first line of the message.
    step = "rtp_llm"

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        found = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert found, "an error without a problem"
        self.problems: tuple[Problem, ...] = tuple(sorted(found, key=Problem.sort_key))
        super().__init__("\n".join(self.lines()))

    def lines(self, text: Callable[[Problem], str] = str) -> tuple[str, ...]:
        """The message by lines: at most :data:`MESSAGE_LIMIT` problems, each as ``text`` spells it."""
        count, shown = len(self.problems), [text(problem) for problem in self.problems[:MESSAGE_LIMIT]]
        if count == 1:
            return (f"{self.step}: {shown[0]}",)
        more = (f"  ... and {count - MESSAGE_LIMIT} more (--json lists all)",) if count > MESSAGE_LIMIT else ()
        return (f"{self.step}: {count} problems", *(f"  - {line}" for line in shown), *more)


class CheckpointError(RtpLlmError):
    """The files are not a checkpoint that can be trusted."""

    step = "checkpoint"


class ConfigError(RtpLlmError):
    """A setting, or ``config.json``, asks for something that is not there."""

    step = "configuration"


class PlanError(RtpLlmError):
    """Checkpoint and model do not fit each other, or the model does not fit the ranks."""

    step = "plan"


class TransportError(RtpLlmError):
    """Bytes could not be moved: I/O errors, files that changed while they were read, memory."""

    step = "transport"


class ParallelError(RtpLlmError):
    """The ranks do not agree, or one of them failed."""

    step = "parallel"
