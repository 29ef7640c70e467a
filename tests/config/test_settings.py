"""Settings: one declaration decides flag, variable, default, allowed values, documentation and dump."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtp_llm.config import LoadConfig, ParallelConfig
from rtp_llm.config.docs import all_settings, settings_page
from rtp_llm.config.kinds import ChoiceKind, Device, Kind, Refusal, Seconds, Switch, Whole
from rtp_llm.config.setting import declared, dump, make, resolve_settings, spelled
from rtp_llm.errors import ConfigError
from tests.support.paths import ROOT

#: One allowed value, as text and as it is in Python, and some that are not allowed, for every setting.
EXAMPLES: dict[str, tuple[str, Any, tuple[str, ...], tuple[Any, ...]]] = {
    "load_method": ("scratch", "scratch", ("fast", "Scratch", "scratch,auto"), (None, 1, b"auto")),
    "device": ("cuda:1", "cuda:1", ("gpu", "cuda:", "cuda:-1", "cuda:1 x", "meta"), (None, 0)),
    "dtype": ("bfloat16", "bfloat16", ("bf16", "int8"), (None, 16)),
    "quantization": ("fp8", "fp8", ("bitsandbytes", "FP8", "inline", "none"), ("bitsandbytes", 8, True)),
    "kernels": ("torch", "torch", ("triton", "Torch", "auto,torch"), (None, 1, True)),
    "reader_threads": ("4", 4, ("-1", "257", "4.0", "1_0", "٣", "four"), (True, 4.0, "4", None)),
    "read_gap_kib": ("0", 0, ("-1", "65537", "1KiB"), (False, None)),
    "buffer_mib": ("32", 32, ("0", "4097", "16MiB"), (False, None)),
    "verify": ("1", True, ("2", "ja"), (1, None, "1")),
    "progress": ("0", False, ("-", "never"), (0, None)),
    "timeout_s": ("2.5", 2.5, ("0", "-1", "nan", "inf", "1e9", "5m"), (float("nan"), float("inf"), True, "5", None)),
    "stacked_moe_mode": ("full-stacked", "full-stacked", ("stacked", "per_expert", "PER-EXPERT"), (None, 1, True)),
    "fastsafetensors_config": ("fst.json", "fst.json", ("a\0b",), ("", "a\0b", 5)),
    "fastsafetensors_config_json": ('{"loader": "base"}', '{"loader": "base"}', ("{", "[]", "base"), ({}, "", 5)),
    "fastsafetensors_nogds": ("1", True, ("2", "never"), (1, None)),
    "fastsafetensors_odirect": ("0", "0", ("2", "yes"), (None, 0, False)),
    "tp_size": ("4", 4, ("0", "4097", "x"), (0, True, None)),
    "tp_rank": ("0", 0, ("-1", "x"), (-1, 1.0)),
    "ep_size": ("1", 1, ("0", "2.0"), (0, None)),
    "ep_rank": ("0", 0, ("-1",), (-1, False)),
    "eplb": ("table.json", "table.json", ("a\0b",), ("", "a\0b", 5)),
}

OWNER = {item.name: cls for cls in (LoadConfig, ParallelConfig) for item in declared(cls)}
ITEM = {item.name: item for item in all_settings()}


def refusal(call: Callable[[], object]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call()
    return caught.value


def test_examples_cover_every_setting() -> None:
    """Every declaration is exercised below."""
    assert set(EXAMPLES) == set(ITEM)


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_flag_beats_environment_beats_default(name: str) -> None:
    """The same text means the same value from a flag and from the environment, and the source is known."""
    item, cls = ITEM[name], OWNER[name]
    text, value, _, _ = EXAMPLES[name]
    by_name = {c.setting.name: c for c in resolve_settings(cls, {}, {})}
    assert (by_name[name].value, by_name[name].source) == (item.default, "default")
    by_name = {c.setting.name: c for c in resolve_settings(cls, {}, {item.env: f" {text} "})}
    assert (by_name[name].value, by_name[name].source) == (value, f"environment variable {item.env}")
    by_name = {c.setting.name: c for c in resolve_settings(cls, {name: text}, {item.env: "nonsense"})}
    assert (by_name[name].value, by_name[name].source) == (value, f"flag --{name}")


@pytest.mark.parametrize("name", sorted(ITEM))
@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_blank_variable_counts_as_unset(name: str, blank: str) -> None:
    """White space in the environment chooses nothing."""
    assert getattr(make(OWNER[name], {}, {ITEM[name].env: blank}), name) == ITEM[name].default


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, example in EXAMPLES.items() for text in example[2]])
def test_bad_text_is_refused_with_source_and_allowed_values(name: str, text: str) -> None:
    """A flag and a variable are refused alike, and the message names setting, source, allowed values and the text."""
    item = ITEM[name]
    for flags, environ, source in (({name: text}, {}, f"flag --{name}"), ({}, {item.env: text}, f"environment variable {item.env}")):
        (problem,) = refusal(lambda flags=flags, environ=environ: make(OWNER[name], flags, environ)).problems
        assert problem.code == "BAD_VALUE"
        assert name in problem.what and source in problem.what
        assert problem.expected == item.kind.allowed
        assert problem.actual == repr(text)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, example in EXAMPLES.items() for value in example[3]])
def test_bad_value_in_python_is_refused(name: str, value: object) -> None:
    """Values given in Python go through the same checks: no bool for a number, no text for a number, no None."""
    (problem,) = refusal(lambda: OWNER[name](**{name: value})).problems
    assert problem.code == "BAD_VALUE" and f"argument {name}" in problem.what


def test_all_bad_values_are_listed_at_once() -> None:
    """Nobody repairs settings one message at a time."""
    error = refusal(lambda: make(LoadConfig, {"dtype": "x", "device": "y"}, {"LOAD_METHOD": "z", "RTP_LLM_TIMEOUT_S": "0"}))
    assert sorted(p.what.split()[3] for p in error.problems) == ["device", "dtype", "load_method", "timeout_s"]
    assert len(refusal(lambda: LoadConfig(dtype="x", device="y", load_method="z")).problems) == 3


def test_ranks_must_lie_below_their_sizes() -> None:
    """Ranks out of range are refused together."""
    assert ParallelConfig(tp_size=4, tp_rank=3).tp_rank == 3
    codes = [p.code for p in refusal(lambda: ParallelConfig(tp_size=4, tp_rank=4, ep_size=2, ep_rank=2)).problems]
    assert codes == ["CONTRADICTION", "CONTRADICTION"]


@pytest.mark.parametrize("cls", [LoadConfig, ParallelConfig])
def test_settings_objects_cannot_change(cls: type[Any]) -> None:
    """Frozen, slotted, hashable; ``from_environment`` of nothing gives the defaults."""
    config = cls.from_environment({})
    assert config == cls() and hash(config) == hash(cls())
    assert not hasattr(config, "__dict__")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, declared(cls)[0].name, "x")


#: Names that deployments already use, ours and those of fastsafetensors itself.
OWN_VARIABLES = {
    "load_method": "LOAD_METHOD",
    "kernels": "KERNELS",
    "stacked_moe_mode": "RTP_FASTSAFETENSORS_STACKED_MOE_MODE",
    "fastsafetensors_config": "FASTSAFETENSORS_CONFIG",
    "fastsafetensors_config_json": "FASTSAFETENSORS_CONFIG_JSON",
    "fastsafetensors_nogds": "FASTSAFETENSORS_NOGDS",
    "fastsafetensors_odirect": "FASTSAFETENSORS_ODIRECT",
}


def test_some_settings_have_their_own_variable_and_all_others_the_prefix() -> None:
    """The names of variables are part of the interface."""
    assert {n: ITEM[n].env for n in ITEM} == {n: OWN_VARIABLES.get(n, f"RTP_LLM_{n.upper()}") for n in ITEM}


def test_dump_tells_every_value_and_where_it_came_from() -> None:
    """The line at start reproduces the run."""
    line = dump(resolve_settings(LoadConfig, {"dtype": "float32"}, {"LOAD_METHOD": "scratch"}))
    assert "load_method=scratch (environment variable LOAD_METHOD)" in line and "dtype=float32 (flag --dtype)" in line
    assert all(f"{item.name}={spelled(item.default)}" in line for item in declared(LoadConfig) if item.name not in ("dtype", "load_method"))


def test_documentation_page_is_what_the_declarations_say() -> None:
    """``docs/settings.md`` is generated: ``python -m rtp_llm.config.docs > docs/settings.md``."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page()


@pytest.mark.parametrize(
    "kind", [ChoiceKind(("a", "b")), Whole(0, 9), Seconds(60), Switch(), Device()], ids=lambda kind: type(kind).__name__
)
@given(text=st.text())
def test_no_text_breaks_a_parser(kind: Kind, text: str) -> None:
    """Whatever is typed is either an allowed value or a refusal."""
    try:
        value = kind.parse(text)
        kind.check(value)
    except Refusal as refused:
        assert refused.expected
