"""One effective configuration: where it comes from, what it holds, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rtp_llm import LoadConfig
from rtp_llm.errors import ConfigError
from rtp_llm.transport.fastsafetensors.config import CHUNK_BYTES, EffectiveConfig, effective

FULL = {
    "loader": "base",
    "parallel": {"use_pipeline": True, "queue_size": 3, "max_batch_bytes": 1 << 20},
    "debug": {"debug_log": True},
    "base": {"copier_type": "nogds", "bbuf_size_kb": 64, "set_numa": True},
}


def test_inline_wins_over_a_named_file_over_the_default_file(tmp_path: Path) -> None:
    """Three places, one order; without any of them the defaults hold."""
    named = tmp_path / "named.json"
    named.write_text('{"queue_size": 1, "use_pipeline": true}')
    assert effective(LoadConfig(), tmp_path) == EffectiveConfig()
    (tmp_path / "fastsafetensors.json").write_text('{"queue_size": 2, "use_pipeline": true}')
    both = LoadConfig(fastsafetensors_config=str(named), fastsafetensors_config_json='{"queue_size": 0, "use_pipeline": true}')
    found = [
        effective(both, tmp_path),
        effective(LoadConfig(fastsafetensors_config=str(named)), tmp_path),
        effective(LoadConfig(), tmp_path),
    ]
    assert [f.queue_size for f in found] == [0, 1, 2] and [f.depth for f in found] == [2, 3, 4]
    assert [Path(f.source).name for f in found] == ["FASTSAFETENSORS_CONFIG_JSON", "named.json", "fastsafetensors.json"]


def test_every_member_arrives() -> None:
    """Groups are flattened as the package does, and a loader's own section goes to its copier, common settings taken out."""
    found = effective(LoadConfig(fastsafetensors_config_json=json.dumps(FULL)))
    assert (found.copier, found.queue_size, found.chunk_bytes, found.debug_log) == ("nogds", 3, 1 << 20, True)
    assert found.copier_options == (("bbuf_size_kb", 64),)


@pytest.mark.parametrize("text", ["{}", json.dumps(FULL), '{"base": {"copier_type": "fgds"}}'])
def test_it_means_what_the_package_makes_of_it(text: str) -> None:
    """Held against the installed package's own reading of the same text."""
    from fastsafetensors import LoaderConfig

    ours, theirs = effective(LoadConfig(fastsafetensors_config_json=text)), LoaderConfig.from_dict(json.loads(text))
    kwargs = theirs.create_parallel_kwargs()
    assert ours.queue_size == kwargs["queue_size"]
    assert ours.chunk_bytes == (kwargs["max_batch_bytes"] or CHUNK_BYTES)
    assert (ours.loader, ours.set_numa, ours.debug_log) == (theirs.loader, theirs.set_numa, theirs.debug_log)
    section = theirs.get_extension_config(theirs.loader)
    assert ours.copier == section.pop("copier_type", "gds") and dict(ours.copier_options) == section


@pytest.mark.parametrize("text", ["{}", '{"base": {"copier_type": "gds"}}', '{"base": {"copier_type": "fgds"}}'])
def test_nogds_overrules(text: str) -> None:
    """FASTSAFETENSORS_NOGDS=1 means no GPUDirect, whatever else is set."""
    environ = {"FASTSAFETENSORS_NOGDS": "1", "FASTSAFETENSORS_CONFIG_JSON": text}
    assert effective(LoadConfig.from_environment(environ)).copier == "nogds"


@pytest.mark.parametrize(("value", "direct"), [("1", True), ("0", False), ("", None), ("auto", None)])
def test_odirect(value: str, direct: bool | None) -> None:
    """The package's own variable overrules the choice by page cache."""
    assert effective(LoadConfig.from_environment({"FASTSAFETENSORS_ODIRECT": value})).direct is direct


def test_everything_wrong_is_told_at_once() -> None:
    """Wrong kinds in a file: each member, with what it should be; bool is no number."""
    bad = {
        "queue_size": True,
        "parallel": {"max_batch_bytes": "1G", "max_concurrent_producers": 2},
        "framework": "paddle",
        "base": {"copier_type": 1},
    }
    with pytest.raises(ConfigError) as caught:
        effective(LoadConfig(fastsafetensors_config_json=json.dumps(bad)))
    named = {problem.what.split()[-4] for problem in caught.value.problems}
    assert named == {"queue_size", "max_batch_bytes", "max_concurrent_producers", "framework", "copier_type"}


@pytest.mark.parametrize("content", [None, b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes | None) -> None:
    """Absent, cut, of another form, not text, or hostile: one error that names the file."""
    path = tmp_path / "fst.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"fst\.json"):
        effective(LoadConfig(fastsafetensors_config=str(path)))


@pytest.mark.parametrize("blank", ["", " ", "\t"])
def test_blank_is_unset(blank: str) -> None:
    """White space in a variable is no value."""
    names = ("RTP_FASTSAFETENSORS_STACKED_MOE_MODE", "FASTSAFETENSORS_CONFIG", "FASTSAFETENSORS_CONFIG_JSON", "FASTSAFETENSORS_NOGDS")
    assert LoadConfig.from_environment(dict.fromkeys(names, blank)) == LoadConfig()


def test_the_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a configuration writes no variable."""
    before = dict(os.environ)
    effective(LoadConfig(fastsafetensors_config_json=json.dumps(FULL)))
    assert dict(os.environ) == before


def test_unknown_members_are_the_packages_own(caplog: pytest.LogCaptureFixture) -> None:
    """A newer package may know more settings: they are no error."""
    members: dict[str, Any] = {"novel": 1, "parallel": {"novel": 2}}
    assert effective(LoadConfig(fastsafetensors_config_json=json.dumps(members))).queue_size == -1


@pytest.mark.parametrize(
    ("budget", "chunk"),
    [(None, CHUNK_BYTES), (16_000_000_000, CHUNK_BYTES), (15_200_000_000, 100_000_000), (15_000_000_001, 1_500_001), (1, 1_500_001)],
)
def test_chunks_follow_the_budget(budget: int | None, chunk: int) -> None:
    """Two chunks fit beside 15 GB of parameters; a budget that these use up makes no chunks of a byte, of which a load has billions."""
    assert EffectiveConfig(device_memory_budget=budget).chunk_for(15_000_000_000) == chunk
