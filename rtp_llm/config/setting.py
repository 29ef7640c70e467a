"""One declaration for each setting: flag, environment variable, default, allowed values and help.

A settings class is a frozen, slotted dataclass whose fields are made by :func:`setting`.  Command-line options, environment
variables, checks, the documentation table and the log line at start all come from the fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

from rtp_llm.config.faults import ConfigFault
from rtp_llm.config.kinds import Kind, Refusal, Switch
from rtp_llm.errors import ConfigError, Problem

_KEY = "rtp_llm.setting"


class SettingsClass(Protocol):
    """The interface of a settings class."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def contradictions(self) -> Iterable[Problem]:
        """Problems of several settings together; called if each of them is allowed."""


S = TypeVar("S", bound=SettingsClass)


@dataclass(frozen=True, slots=True)
class Setting:
    """A declaration; ``flags`` has the main spelling first, and ``off`` the flags that turn a switch off."""

    name: str
    kind: Kind
    default: object
    help: str
    env: str
    flags: tuple[str, ...]
    off: tuple[str, ...] = ()


def setting(kind: Kind, default: Any, help: str, *, env: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """A dataclass field that is a setting.

    Args:
        kind: which values are allowed.
        default: the value where neither flag nor variable is given.
        help: one sentence, for ``--help`` and the documentation.
        env: the environment variable; ``RTP_LLM_<NAME>`` unless given.
        aliases: further spellings of the flag ``--<name>``.
    """
    return dataclasses.field(default=default, metadata={_KEY: (kind, help, env, aliases)})


def declared(cls: type[S]) -> tuple[Setting, ...]:
    """The declarations of a settings class, in the order of its fields."""
    return tuple(_declaration(field) for field in dataclasses.fields(cls))


def _declaration(field: dataclasses.Field[Any]) -> Setting:
    kind, text, env, aliases = field.metadata[_KEY]
    return Setting(
        field.name,
        kind,
        field.default,
        text,
        env or f"RTP_LLM_{field.name.upper()}",
        (f"--{field.name}", *aliases),
        (f"--no_{field.name}",) if isinstance(kind, Switch) else (),
    )


def validate(config: SettingsClass) -> None:
    """Checks all values; every settings class calls it in ``__post_init__``.

    Raises:
        ConfigError: with all values that are not allowed.
    """
    problems = [p for s in declared(type(config)) for p in _check(s, getattr(config, s.name), f"argument {s.name}")]
    if not problems:
        problems = list(config.contradictions())
    if problems:
        raise ConfigError(problems)


def _check(item: Setting, value: object, source: str) -> Iterator[Problem]:
    try:
        item.kind.check(value)
    except Refusal as refusal:
        yield _problem(refusal, item, value, source)


def _problem(refusal: Refusal, item: Setting, value: object, source: str) -> Problem:
    what = "is not available" if refusal.fault is ConfigFault.NOT_SUPPORTED else "is not allowed"
    return Problem(
        refusal.fault,
        f"this value of {item.name} {what} ({source})",
        expected=refusal.expected,
        actual=repr(value),
        fix=refusal.fix,
    )


@dataclass(frozen=True, slots=True)
class ResolvedSetting:
    """A setting's value and its source: ``flag --x``, ``environment variable X``, ``launcher`` or ``default``."""

    setting: Setting
    value: object
    source: str


def resolve_settings(
    cls: type[S], flags: Mapping[str, object], environ: Mapping[str, str], facts: Mapping[str, object] | None = None
) -> tuple[ResolvedSetting, ...]:
    """Each setting's value: from ``facts``, else the flag, else the environment, else the default.

    Args:
        cls: a settings class.
        flags: values by setting name; None means that the flag was not given.  Texts are parsed, switches are taken as
            they are.
        environ: usually ``os.environ``.  A variable that is blank counts as unset.
        facts: values by setting name that are not the user's to choose: a launcher's ranks.

    Raises:
        ConfigError: with all values that are not allowed, each with its source.
    """
    resolved: list[ResolvedSetting] = []
    problems: list[Problem] = []
    for item in declared(cls):
        given, source = _given(item, flags, environ, facts or {})
        try:
            value = item.kind.parse(given) if isinstance(given, str) else given
            item.kind.check(value)
            resolved.append(ResolvedSetting(item, value, source))
        except Refusal as refusal:
            problems.append(_problem(refusal, item, given, source))
    if problems:
        raise ConfigError(problems)
    return tuple(resolved)


def _given(item: Setting, flags: Mapping[str, object], environ: Mapping[str, str], facts: Mapping[str, object]) -> tuple[object, str]:
    if item.name in facts:
        return facts[item.name], "launcher"
    flag = flags.get(item.name)
    if flag is not None:
        return flag.strip() if isinstance(flag, str) else flag, f"flag {item.flags[0]}"
    text = environ.get(item.env, "").strip()
    if text:
        return text, f"environment variable {item.env}"
    return item.default, "default"


def make(cls: type[S], flags: Mapping[str, object], environ: Mapping[str, str]) -> S:
    """An object of the settings class from flags, environment and defaults; see :func:`resolve_settings`."""
    return cls(**{c.setting.name: c.value for c in resolve_settings(cls, flags, environ)})


def spelled(value: object) -> str:
    """A value as a flag or a variable spells it; ``none`` for None."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def dump(resolved: Iterable[ResolvedSetting]) -> str:
    """One line for the log: every value, with its source unless it is the default."""
    return " ".join(f"{c.setting.name}={spelled(c.value)}" + ("" if c.source == "default" else f" ({c.source})") for c in resolved)
