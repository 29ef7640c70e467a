"""What a checkpoint declares of its quantisation, read without trusting it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rtp_llm.errors import Problem
from rtp_llm.quantization.faults import QuantFault, QuantizationError
from rtp_llm.quantization.names import Match, Names, texts
from rtp_llm.quantization.scheme import Spec

#: How much of a bad value a message shows.
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that ``names`` match are quantised by ``spec``; all linear layers where ``names`` is None."""

    spec: Spec
    names: Names | None = None


@dataclass(frozen=True, slots=True)
class Declared:
    """A declaration, whatever the format that it came in.

    ``groups`` are tried in order.  ``complete``: the lists claim to say of every linear layer whether it is quantised, so that a
    plain one that they do not name is a contradiction; else the tensors alone decide.
    ``experts_only``: the method is for experts alone, and says nothing of other layers.
    ``options`` are the few words of the declaration that reports repeat.
    """

    method: str
    groups: tuple[Group, ...]
    excluded: Names = Names()
    complete: bool = False
    options: tuple[tuple[str, str], ...] = ()
    experts_only: bool = False

    @property
    def specs(self) -> tuple[Spec, ...]:
        return tuple(group.spec for group in self.groups)

    def group_of(self, name: str) -> tuple[Group | None, tuple[str, ...]]:
        """The group of the module ``name`` as the checkpoint spells it, and the entries that say so; None: it is excluded, or no
        group names it."""
        entries = self.excluded.matching(name)
        if entries:
            return None, entries
        for group in self.groups:
            if group.names is None:
                return group, ()
            entries = group.names.matching(name)
            if entries:
                return group, entries
        return None, ()


@dataclass(slots=True)
class Fields:
    """Typed access to a declaration; problems are collected, and :meth:`finish` raises them all."""

    raw: Mapping[str, Any]
    file: str
    path: str
    problems: list[Problem] = field(default_factory=list)

    def finish(self) -> None:
        """Raises:
        QuantizationError: with all problems found, if any.
        """
        if self.problems:
            raise QuantizationError(self.problems)

    def fail(self, name: str, expected: str, fault: QuantFault = QuantFault.BAD_DECLARATION, fix: str | None = None) -> None:
        """Notes a problem with the field ``name``."""
        actual = _shown(self.raw[name]) if name in self.raw else "nothing"
        self.problems.append(Problem(fault, f"field {self.path}{name}", file=self.file, expected=expected, actual=actual, fix=fix))

    def unsupported(self, name: str, expected: str, fix: str | None = None) -> None:
        """Notes a field that asks for what is not there."""
        self.fail(name, expected, QuantFault.UNSUPPORTED_SCHEME, fix)

    def first(self, *names: str) -> str:
        """The first of ``names`` that is there and not null, else the first: formats have had several names for one field."""
        return next((name for name in names if self.raw.get(name) is not None), names[0])

    def integer(self, name: str, default: int | None, allowed: Collection[int] | None = None) -> int | None:
        """A whole number, one of ``allowed`` where given, else at least 1; ``default`` where absent or null."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or (allowed is None and not 0 < value < 2**24):
            self.fail(name, "a whole number above 0")
            return default
        if allowed is not None and value not in allowed:
            self.unsupported(name, f"one of {', '.join(map(str, sorted(allowed)))}")
            return default
        return value

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false")
            return default
        return value

    def choice(self, name: str, default: str, known: Collection[str]) -> str:
        """One of ``known``, whatever the case."""
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or value.lower() not in known:
            self.unsupported(name, f"one of {', '.join(sorted(known))}")
            return default
        return value.lower()

    def nested(self, name: str) -> Fields | None:
        """The object under ``name``, whose problems are this one's; None where absent, null or empty."""
        value = self.raw.get(name)
        if not value:
            return None
        if not isinstance(value, Mapping):
            self.fail(name, "an object")
            return None
        return Fields(value, self.file, f"{self.path}{name}.", self.problems)

    def names(self, match: Match, *fields: str) -> Names:
        """All lists under these fields as one."""
        found: list[str] = []
        for name in fields:
            listed = texts(self.raw.get(name))
            if listed is None:
                self.fail(name, "a list of names")
            else:
                found += listed
        return Names(tuple(found), match)

    def absent(self, name: str, why: str) -> None:
        """Refuses a field that says anything but "none"."""
        if self.raw.get(name) not in (None, False, "", [], {}):
            self.unsupported(name, "nothing", why)


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    if isinstance(value, (list, tuple)) and len(value) > 4:
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
