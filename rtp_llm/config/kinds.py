"""Kinds of values: how a text becomes a value, and which values are allowed.

Flags and environment variables arrive as text and go through ``parse`` and then ``check``; values given in Python go
through ``check`` alone.  Both raise :class:`Refusal`, which the caller turns into a problem with the source of the value.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import isfinite
from typing import Protocol

from rtp_llm.config.faults import ConfigFault


class Refusal(Exception):
    """A value that is not allowed; never leaves this package."""

    def __init__(self, expected: str, fault: ConfigFault = ConfigFault.BAD_VALUE, fix: str | None = None) -> None:
        super().__init__(expected)
        self.expected = expected
        self.fault = fault
        self.fix = fix


class Kind(Protocol):
    """What a setting's values are."""

    @property
    def allowed(self) -> str:
        """The allowed values, for help, documentation and errors."""

    def parse(self, text: str) -> object:
        """The value of a flag's or variable's text, which is stripped and not empty."""

    def check(self, value: object) -> None:
        """Raises :class:`Refusal` for a value that is not allowed, or of another type."""


@dataclass(frozen=True, slots=True)
class ChoiceKind:
    """One of a few words."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " | ".join(self.values)

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> None:
        if not isinstance(value, str) or value not in self.values:
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class OptionalChoiceKind:
    """One of a few words, or none."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return " | ".join(self.values)

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> None:
        if value is not None and (not isinstance(value, str) or value not in self.values):
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number from ``least`` to ``most`` (both inclusive)."""

    least: int
    most: int

    @property
    def allowed(self) -> str:
        return f"whole number, {self.least} to {self.most}"

    def parse(self, text: str) -> int:
        # int() alone would accept "1_0" and digits of other scripts.
        if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
            raise Refusal(self.allowed)
        return int(text)

    def check(self, value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or not self.least <= value <= self.most:
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time above zero, in seconds."""

    most: float

    @property
    def allowed(self) -> str:
        return f"seconds, above 0, at most {self.most:g}"

    def parse(self, text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise Refusal(self.allowed) from None

    def check(self, value: object) -> None:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not isfinite(value) or not 0 < value <= self.most:
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off: a pair of flags, or a variable that is 1 or 0."""

    allowed: str = "1 | 0"

    def parse(self, text: str) -> bool:
        words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
        if text.lower() not in words:
            raise Refusal(self.allowed)
        return words[text.lower()]

    def check(self, value: object) -> None:
        if not isinstance(value, bool):
            raise Refusal("True | False")


@dataclass(frozen=True, slots=True)
class Device:
    """Where weights go; use of the device checks that it exists."""

    allowed: str = "auto | cpu | cuda | cuda:N"

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> None:
        if not isinstance(value, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class FilePath:
    """A file, or none; reading checks that it exists."""

    allowed: str = "a file"

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> None:
        if value is not None and (not isinstance(value, str) or not value or "\0" in value):
            raise Refusal(self.allowed)


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object as text; its user checks the content."""

    allowed: str = "a JSON object"

    def parse(self, text: str) -> str:
        return text

    def check(self, value: object) -> None:
        if value is None:
            return
        try:
            if isinstance(value, str) and isinstance(json.loads(value), dict):
                return
        except (ValueError, RecursionError):
            pass
        raise Refusal(self.allowed)
