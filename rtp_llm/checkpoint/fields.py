"""Typed reading of small, untrusted JSON objects of a checkpoint; all problems are reported at once.

A :class:`FieldReader` reads every family's ``config.json`` and every declaration of quantisation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeGuard

from rtp_llm.errors import Problem, RtpLlmError

#: The default file in problems.
CONFIG_FILE: Final = "config.json"

#: The largest size of one dimension: some 50 times any published model's, and small enough that the bytes of a matrix of
#: two of them still fit 63 bits.
MAX_SIZE: Final = 2**24

#: The range of numbers that are not whole.  Nothing published comes near either end, and powers and products of a few of
#: them stay finite in float64.
MIN_NUMBER: Final = 1e-30
MAX_NUMBER: Final = 1e30

#: How much of a bad value a message shows; a hostile one may be megabytes long.
MAX_SHOWN: Final = 100


@dataclass(frozen=True, slots=True)
class FieldFaults:
    """The faults and the error of one kind of object.

    ``lenient``: ``null`` and empty values count as absent, and words may be in any case.
    """

    bad: Enum
    unsupported: Enum
    error: type[RtpLlmError]
    lenient: bool = False


class FieldReader:
    """Typed access to the fields of one JSON object.

    A bad field is noted once and its default returned; :meth:`finish` raises all problems.  Checks across fields ask
    :meth:`sound` first, so that one mistake is one problem.  An absent field takes its default.  ``null`` does so too in a
    lenient reader, and in the ``optional_`` methods.
    """

    def __init__(
        self, raw: Mapping[str, Any], faults: FieldFaults, *, file: str = CONFIG_FILE, path: str = "", problems: list[Problem] | None = None
    ) -> None:
        self.raw = raw
        self.file = file
        self.path = path
        self.problems: list[Problem] = [] if problems is None else problems
        self._faults = faults

    def beside(self, raw: Mapping[str, Any], path: str) -> FieldReader:
        """A reader of another object under ``path``, which shares the list of problems."""
        return FieldReader(raw, self._faults, file=self.file, path=path, problems=self.problems)

    def finish(self) -> None:
        """Raises:
        RtpLlmError: the object's error, with all problems found, if any.
        """
        if self.problems:
            raise self._faults.error(self.problems)

    def fail(self, name: str, expected: str, *, fault: Enum | None = None, actual: object = None, fix: str | None = None) -> None:
        """Notes a problem with the field ``name`` if it has none yet; ``actual`` is its value by default."""
        if not self.sound(name):
            return
        if actual is None:
            actual = _shown(self.raw[name]) if name in self.raw else "nothing"
        what = f"field {self.path}{name}"
        self.problems.append(Problem(fault or self._faults.bad, what, file=self.file, expected=expected, actual=str(actual), fix=fix))

    def unsupported(self, name: str, expected: str, fix: str | None = None) -> None:
        """Notes a field that asks for an unsupported feature."""
        self.fail(name, expected, fault=self._faults.unsupported, fix=fix)

    def _value(self, name: str, default: object) -> Any:
        value = self.raw.get(name, default)
        return default if value is None and self._faults.lenient else value

    def first(self, *names: str) -> str:
        """The first of ``names`` that is present and not null, else the first name: formats rename fields."""
        return next((name for name in names if self.raw.get(name) is not None), names[0])

    def absent(self, name: str, why: str) -> None:
        """Refuses a field that says anything but "none"."""
        if self.raw.get(name) not in (None, False, "", [], {}):
            self.unsupported(name, "nothing", why)

    def sound(self, *names: str) -> bool:
        """Whether no problem was found with any of these fields."""
        bad = {problem.what for problem in self.problems}
        return not any(f"field {self.path}{name}" in bad for name in names)

    def integer(self, name: str, default: int, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number in ``[least, most]``."""
        value = self._value(name, default)
        if not _is_int(value) or not least <= value <= most:
            self.fail(name, f"a whole number from {least} to {most}")
            return default
        return int(value)

    def integer_among(self, name: str, default: int, allowed: Collection[int]) -> int:
        """One of the ``allowed`` whole numbers."""
        value = self._value(name, default)
        if not _is_int(value) or value not in allowed:
            self.unsupported(name, f"one of {', '.join(map(str, sorted(allowed)))}")
            return default
        return int(value)

    def optional_integer(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int | None:
        """The same, or None for ``null``."""
        if self.raw.get(name, default) is None:
            return None
        return self.integer(name, least if default is None else default, least=least, most=most)

    def number(self, name: str, default: float, *, above: float = 0.0) -> float:
        """A number greater than ``above``, and neither too small nor too large to compute with."""
        value = self.raw.get(name, default)
        if not _is_number(value) or not max(above, MIN_NUMBER) < value <= MAX_NUMBER:
            self.fail(name, f"a number above {above:g}, up to {MAX_NUMBER:g}")
            return default
        return float(value)

    def optional_number(self, name: str, *, above: float = 0.0) -> float | None:
        """The same, or None where it is absent or ``null``."""
        return None if self.raw.get(name) is None else self.number(name, above + 1, above=above)

    def boolean(self, name: str, default: bool) -> bool:
        """``true`` or ``false``."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false")
            return default
        return value

    def choice(self, name: str, default: str, known: Collection[str]) -> str:
        """One of the ``known`` words, which are in lower case where the reader is lenient."""
        value = self._value(name, None)
        if value is None and (self._faults.lenient or name not in self.raw):
            return default
        if isinstance(value, str) and self._faults.lenient:
            value = value.lower()
        if not isinstance(value, str) or value not in known:
            self.unsupported(name, f"one of {', '.join(sorted(known))}")
            return default
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of ``length`` positive finite numbers."""
        value = self.raw.get(name)
        if not _is_list(value) or len(value) != length or not all(_is_number(x) and x > 0 for x in value):
            self.fail(name, f"a list of {length} positive numbers")
            return (1.0,) * length
        return tuple(map(float, value))

    def words(self, name: str, length: int, known: Collection[str]) -> tuple[str, ...] | None:
        """A list of ``length`` of the ``known`` words; None where it is absent or ``null``."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not _is_list(value) or len(value) != length or not all(isinstance(x, str) and x in known for x in value):
            self.fail(name, f"a list of {length} of {', '.join(sorted(known))}")
            return None
        return tuple(value)

    def nested(self, name: str) -> FieldReader | None:
        """A reader of the object under ``name``, which adds to the same problems; None where it is absent, ``null`` or empty."""
        value = self.raw.get(name)
        if value is None or (self._faults.lenient and not value):
            return None
        if not isinstance(value, Mapping):
            self.fail(name, "an object")
            return None
        return self.beside(value, f"{self.path}{name}.") if value else None

    def only(self, name: str, allowed: Sequence[object], reason: str) -> None:
        """Refuses any value of ``name`` but those ``allowed``; absence is allowed."""
        value = self.raw.get(name, allowed[0])
        if not any(type(value) is type(one) and value == one for one in allowed):
            self.unsupported(name, " or ".join(map(repr, allowed)), reason)


def _shown(value: object) -> str:
    """A JSON value for a message: containers by their size, since a deep one cannot be printed."""
    if isinstance(value, Mapping):
        return f"an object of {len(value)}"
    if _is_list(value):
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    # An int too large for a float does not count.
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
