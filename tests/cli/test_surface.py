"""The command line's surface is an interface: a change of it has to be made here too, on purpose."""

from __future__ import annotations

import click
import pytest

from rtp_llm.cli.app import app, main
from rtp_llm.config.docs import all_settings
from rtp_llm.runtime.sampling import MOST_SEED
from tests.support.paths import ROOT

_COMMON = "--json --debug"
_LOADING = (
    "--load_method --device --dtype --quantization --kernels --reader_threads --buffer_mib --read_gap_kib --progress/--no_progress"
    " --timeout_s"
    " --stacked_moe_mode --fastsafetensors_config --fastsafetensors_config_json"
    " --fastsafetensors_nogds/--no_fastsafetensors_nogds --fastsafetensors_odirect"
    " --tp_size --ep_size --eplb"
)
SURFACE = {
    "inspect": f"CKPT --tensors {_COMMON}",
    "plan": f"CKPT --tp_size --tp_rank/--rank --ep_size --ep_rank --eplb --dtype --quantization --reader_threads --buffer_mib {_COMMON}",
    "warmup": f"CKPT --device --dtype --quantization --kernels --tp_size --tp_rank/--rank --ep_size --ep_rank --eplb {_COMMON}",
    "load": f"CKPT {_LOADING} --tp_rank/--rank --ep_rank --verify/--no_verify {_COMMON}",
    "generate": "CKPT --prompt --prompts_file --max_new_tokens --raw --temperature --top_k --top_p --seed --batch_size"
    f" --cuda_graphs/--no_cuda_graphs --stream/--no_stream {_LOADING} {_COMMON}",
    "embed": f"CKPT --text {_LOADING} {_COMMON}",
    "export": f"CKPT OUT {_LOADING} {_COMMON}",
    "models": _COMMON,
    "doctor": f"DIRECTORY {_COMMON}",
    "bench": "CKPT --runs --contenders --cache --drop_caches --plot --device --reader_threads --buffer_mib"
    f" --tp_size --tp_rank/--rank --ep_size --ep_rank {_COMMON}",
    "settings": _COMMON,
}


def surface(command: click.Command) -> str:
    """Arguments by metavar and options by all their spellings, in the order of declaration."""
    return " ".join(
        "/".join((*p.opts, *p.secondary_opts)) if isinstance(p, click.Option) else (p.metavar or str(p.name).upper())
        for p in command.params
    )


def test_commands_and_flags_are_frozen() -> None:
    """Scripts rely on every name here."""
    assert {name: surface(command) for name, command in app.commands.items()} == SURFACE


def test_every_setting_is_a_flag_of_some_command() -> None:
    """The documentation lists no flag that nothing accepts."""
    flags = {flag for command in app.commands.values() for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    assert {flag for item in all_settings() for flag in (*item.flags, *item.off)} <= flags


def test_a_setting_is_a_flag_by_being_declared() -> None:
    """``load`` has every setting, and so have the other commands that load weights, but for what is of ``load`` alone: nothing but
    the declaration decides it."""
    flags = {name: {p.name for p in command.params} for name, command in app.commands.items()}
    declared = {item.name for item in all_settings()}
    assert declared <= flags["load"]
    for name in ("generate", "embed", "export"):
        assert declared - flags[name] == {"tp_rank", "ep_rank", "verify"}, name


@pytest.mark.parametrize("command", sorted(SURFACE))
def test_help_has_examples_and_needs_no_arguments(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--help`` of every command shows how to call it, and names the default and variable of every setting."""
    assert main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"rtp-llm {command}" in shown.partition("Examples:")[2]
    for item in all_settings():
        if item.name in {p.name for p in app.commands[command].params}:
            assert f"[env {item.env}; default " in shown


def test_hyphens_are_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    """``--tp-size`` is ``--tp_size``: the refusal of its value shows that it was read."""
    assert main(["plan", "nowhere", "--tp-size", "x"]) == 2
    assert "flag --tp_size" in capsys.readouterr().err


def test_documentation_names_every_command_and_exit_code() -> None:
    """``docs/cli.md`` is complete."""
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"| `{name}" in page for name in SURFACE)
    assert all(f"| {code} |" in page for code in (0, 1, 2, 70, 130))


def test_the_largest_seed_is_that_of_sampling() -> None:
    """The parser's bound, which stands apart so that help needs no torch, is the one that sampling checks."""
    seed = next(parameter for parameter in app.commands["generate"].params if parameter.name == "seed")
    assert isinstance(seed.type, click.IntRange) and seed.type.max == MOST_SEED
