"""Lists of module names as quantisation configurations write them, and what they match.

Every format matches differently.  A list is normalised once: order, container and the prefixes of multimodal wrappers do not
matter.  Names are the checkpoint's; for parts of a fused layer the fused name is tried as well.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

# Not re: this one has time limits.  It is a requirement of transformers.
import regex  # type: ignore[import-untyped]

from rtp_llm.errors import Problem
from rtp_llm.quantization.faults import QuantFault, QuantizationError

#: anchored: the whole name, or a regular expression behind ``re:`` from its beginning (compressed-tensors).
#: segments: whole dotted parts anywhere in the name (Hugging Face's fp8 and mxfp4, SGLang).
#: substring: anywhere (AWQ).
#: glob: the whole name, or one dotted part (ModelOpt, Quark).
Match = Literal["anchored", "segments", "substring", "glob"]

#: What wrappers put before the names of the language model.
_PREFIX = re.compile(r"^(?:model\.language_model\.|language_model\.model\.|language_model\.|model\.)")
_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "language_model.")

#: A part of a fused layer, and what the layer is called where it is written fused.
_FUSED = {
    "q_proj": ("qkv_proj",),
    "k_proj": ("qkv_proj",),
    "v_proj": ("qkv_proj",),
    "gate_proj": ("gate_up_proj",),
    "up_proj": ("gate_up_proj",),
    "w1": ("w13",),
    "w3": ("w13",),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa",),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa",),
}

#: Seconds for one name and expression, and for a whole list: an untrusted expression may never end.  Real ones take microseconds,
#: and a second for a model with 45,000 modules.
_TIMEOUT, _BUDGET = 0.5, 10.0

#: A glob whose only wildcard ends it.
_SIMPLE = re.compile(r"[^*?\[{]+\*")

_PLACEHOLDER = re.compile(r"\{[^{}]*\}")


def canonical(name: str) -> str:
    """A name without what wrappers put before it."""
    return _PREFIX.sub("", name, count=1)


def spellings(name: str) -> Iterator[str]:
    """The canonical name, and the fused ones of the layer that it is a part of."""
    plain = canonical(name)
    yield plain
    parent, _, leaf = plain.rpartition(".")
    for fused in _FUSED.get(leaf, ()):
        yield f"{parent}.{fused}" if parent else fused


@dataclass(slots=True)
class _Compiled:
    """A list, split by how entries are looked up: by the whole name, by runs of dotted parts, by a prefix (of each length that
    an entry has), or one after another."""

    whole: dict[str, str] = field(default_factory=dict)
    runs: dict[str, str] = field(default_factory=dict)
    beginnings: dict[int, dict[str, str]] = field(default_factory=dict)
    parts: list[tuple[str, regex.Pattern[str]]] = field(default_factory=list)
    starts: list[tuple[str, regex.Pattern[str]]] = field(default_factory=list)
    substrings: list[tuple[str, str]] = field(default_factory=list)
    spent: float = 0.0


@dataclass(frozen=True, slots=True)
class Names:
    """A normalised list.  ``entries``: as the checkpoint spells them, sorted and unique."""

    entries: tuple[str, ...] = ()
    match: Match = "anchored"
    _compiled: _Compiled = field(default_factory=_Compiled, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(sorted({*self.entries})))
        for entry in self.entries:
            self._compile(entry)

    def __bool__(self) -> bool:
        return bool(self.entries)

    def _compile(self, entry: str) -> None:
        found = self._compiled
        if entry.startswith("re:"):
            found.starts.append((entry, _pattern(entry, entry[3:])))
            return
        plain = canonical(entry.strip().removesuffix(".weight").strip("."))
        open_ended = "*" in plain or _PLACEHOLDER.search(plain) is not None
        if not open_ended:
            found.whole[plain] = entry
        if self.match == "substring":
            found.substrings.append((entry, plain))
        elif self.match == "segments":
            if open_ended:
                found.parts.append((entry, _pattern(entry, rf"(?:.*\.)?{_globbed(plain)}(?:\..*)?")))
            else:
                found.runs[plain] = entry
        elif self.match == "glob" and _SIMPLE.fullmatch(plain):
            # ModelOpt writes one for each layer: too many to try them all on every expert.
            found.beginnings.setdefault(len(plain) - 1, {})[plain[:-1]] = entry
        elif open_ended:
            found.parts.append((entry, _pattern(entry, _globbed(plain, dots=self.match == "glob"))))

    def matching(self, name: str) -> tuple[str, ...]:
        """The entries that match the module ``name``.

        Raises:
            QuantizationError: ``SLOW_PATTERN``.
        """
        if not self.entries:
            return ()
        return tuple(sorted({entry for spelled in spellings(name) for entry in self._matching(spelled)}))

    def _matching(self, plain: str) -> Iterator[str]:
        found = self._compiled
        if plain in found.whole:
            yield found.whole[plain]
        if found.runs:
            segments = plain.split(".")
            for start in range(len(segments)):
                for stop in range(start + 1, len(segments) + 1):
                    entry = found.runs.get(".".join(segments[start:stop]))
                    if entry is not None:
                        yield entry
        yield from (entry for entry, text in found.substrings if text in plain)
        candidates = (plain, *plain.split(".")) if self.match == "glob" else (plain,)
        for length, entries in found.beginnings.items():
            yield from (entries[one[:length]] for one in candidates if one[:length] in entries)
        for entry, pattern in found.parts:
            if any(_matches(pattern.fullmatch, entry, one, found) for one in candidates):
                yield entry
        for entry, pattern in found.starts:
            if any(_matches(pattern.match, entry, prefix + plain, found) for prefix in _PREFIXES):
                yield entry


def _globbed(text: str, *, dots: bool = False) -> str:
    """A template or glob as a regular expression; ``*`` and ``{i}`` stay within one dotted part unless ``dots``."""
    text = _PLACEHOLDER.sub("*", text)
    if dots:
        return fnmatch.translate(text).removesuffix(r"\z").removesuffix(r"\Z")
    return "[^.]*".join(regex.escape(piece) for piece in text.split("*"))


def _pattern(entry: str, text: str) -> regex.Pattern[str]:
    try:
        return regex.compile(text)
    except regex.error as error:
        raise QuantizationError(
            Problem(
                QuantFault.BAD_DECLARATION,
                f"an excluded name is no regular expression: {error}"[:200],
                file="config.json",
                expected="re: and a regular expression",
                actual=repr(entry)[:100],
            )
        ) from None


def _matches(test: Callable[..., object], entry: str, name: str, compiled: _Compiled) -> bool:
    start = time.perf_counter()
    try:
        found = test(name, timeout=_TIMEOUT) is not None
    except TimeoutError:
        raise _too_slow(entry, name) from None
    compiled.spent += time.perf_counter() - start
    if compiled.spent > _BUDGET:
        raise _too_slow(entry, name)
    return found


def _too_slow(entry: str, name: str) -> QuantizationError:
    return QuantizationError(
        Problem(
            QuantFault.SLOW_PATTERN,
            f"regular expressions take more than {_TIMEOUT} s for one name, or {_BUDGET} s for all, at {name}"[:300],
            file="config.json",
            expected="expressions that name modules",
            actual=repr(entry)[:100],
        )
    )


def texts(value: object) -> Iterable[str] | None:
    """The strings of a list as JSON has it: a list, the keys of an object, one string, or nothing; None for anything else."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, dict):
        value = list(value)
    if isinstance(value, (list, tuple)) and all(isinstance(one, str) for one in value):
        return value
    return None
