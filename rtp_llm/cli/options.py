"""Options of the commands, made from the declarations of settings, and the settings that result."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from rtp_llm.cli.output import Output
from rtp_llm.cli.ranks import launched, speaks
from rtp_llm.config import ConfigFault, LoadConfig, ParallelConfig
from rtp_llm.config.kinds import Switch
from rtp_llm.config.setting import ResolvedSetting, Setting, declared, dump, resolve_settings, spelled
from rtp_llm.errors import ConfigError, Problem

F = TypeVar("F", bound=Callable[..., Any])

#: What a launcher decides, but for ``ep_size``, which divides its processes.
_PLACE = ("tp_size", "tp_rank", "ep_size", "ep_rank")

_DECLARED = {item.name: item for item in declared(LoadConfig) + declared(ParallelConfig)}

#: Settings of the command ``load`` alone: one rank without the others, and a check after the load.
LOAD_ALONE = ("tp_rank", "ep_rank", "verify")
#: Settings of every command that loads weights: all others, so that a new one is a flag by being declared.
LOADING = tuple(name for name in _DECLARED if name not in LOAD_ALONE)

checkpoint_argument = click.argument("checkpoint", metavar="CKPT", type=click.Path())


def common(function: F) -> F:
    """The options that every command has."""
    function = click.option("--debug", is_flag=True, help="Show the traceback of an error.", expose_value=False)(function)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.", expose_value=False)(function)


def setting_options(*names: str) -> Callable[[F], F]:
    """One option for each named setting.  Values stay text, which the declarations parse and check."""

    def add(function: F) -> F:
        for name in reversed(names):
            function = _option(_DECLARED[name])(function)
        return function

    return add


def _option(item: Setting) -> Callable[[F], F]:
    text = f"{item.help} [env {item.env}; default {spelled(item.default)}]"
    if isinstance(item.kind, Switch):
        return click.option(f"{item.flags[0]}/{item.off[0]}", item.name, default=None, help=text)
    metavar = item.kind.allowed.replace(" ", "") if "|" in item.kind.allowed else "N" if isinstance(item.default, (int, float)) else "VALUE"
    return click.option(*item.flags, item.name, default=None, metavar=metavar, help=text)


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """The resolved settings of one command."""

    load: LoadConfig
    parallel: ParallelConfig
    resolved: tuple[ResolvedSetting, ...]

    def text(self) -> str:
        """All of them in one line, for the log."""
        return f"settings: {dump(self.resolved)}"


def output_of(context: click.Context) -> Output:
    """How the running command answers; set by :func:`rtp_llm.cli.app.main`."""
    output = context.find_root().obj
    return output if isinstance(output, Output) else Output(json=False, speaks=speaks(os.environ))


def command_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> CommandSettings:
    """Settings from flags, the environment and, under a launcher, this process's rank.

    Raises:
        ConfigError: every value that is not allowed, of both classes; ranks that contradict the launcher's.
    """
    facts = _facts(flags, environ)
    problems: list[Problem] = []
    resolved: list[ResolvedSetting] = []
    made: list[Any] = []
    for cls in (LoadConfig, ParallelConfig):
        try:
            part = resolve_settings(cls, flags, environ, facts)
            values: dict[str, Any] = {c.setting.name: c.value for c in part}
            made.append(cls(**values))
            resolved += part
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return CommandSettings(made[0], made[1], tuple(resolved))


def _facts(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, int]:
    """The sizes and ranks that a launcher dictates: all processes, in ``ep_size`` groups of ``tp_size``."""
    launch = launched(environ)
    if launch is None:
        return {}
    given = {name: str(flags.get(name) or environ.get(_DECLARED[name].env, "").strip()) for name in _PLACE}
    # Text that is no number is refused where all settings are parsed.
    ep_size = int(given["ep_size"] or "1") if re.fullmatch("[0-9]{0,9}", given["ep_size"]) else 1
    if not 0 < ep_size <= launch.size or launch.size % ep_size:
        raise ConfigError(
            Problem(
                ConfigFault.CONTRADICTION,
                "ep_size and the launcher contradict each other",
                expected=f"a divisor of WORLD_SIZE={launch.size}",
                actual=given["ep_size"],
                fix="start tp_size * ep_size processes",
            )
        )
    tp_size = launch.size // ep_size
    facts = {"tp_size": tp_size, "tp_rank": launch.rank % tp_size, "ep_size": ep_size, "ep_rank": launch.rank // tp_size}
    problems = [
        Problem(
            ConfigFault.CONTRADICTION,
            f"{name} and the launcher contradict each other",
            expected=f"{facts[name]} (RANK={launch.rank} WORLD_SIZE={launch.size} ep_size={ep_size})",
            actual=text,
            fix="leave it out: under torchrun the processes are the ranks",
        )
        for name, text in given.items()
        if text and text != str(facts[name])
    ]
    if problems:
        raise ConfigError(problems)
    return facts
