"""``config.json`` and its neighbours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rtp_llm.checkpoint import CheckpointFault, read_config, read_json_file
from rtp_llm.errors import CheckpointError


def test_reads_what_is_there(tmp_path: Path) -> None:
    """Values come through unchanged, also through a link without a suffix."""
    config = {"architectures": ["LlamaForCausalLM"], "rope_scaling": None, "eos_token_id": [1, 2], "name": "é"}
    (tmp_path / "blob").write_text(json.dumps(config, ensure_ascii=False), encoding="utf-8")
    (tmp_path / "config.json").symlink_to("blob")
    assert read_config(tmp_path) == config


def test_other_files_may_be_absent(tmp_path: Path) -> None:
    """None for a file that is not there; in a folder of its own it is found."""
    assert read_json_file(tmp_path, "generation_config.json") is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert read_json_file(tmp_path, "1_Pooling/config.json") == {"pooling_mode_mean_tokens": True}


@pytest.mark.parametrize("value", [None, [], "LlamaForCausalLM", [""], [1], {"a": 1}])
def test_architectures_must_be_names(tmp_path: Path, value: object) -> None:
    """Anything but a non-empty list of strings is refused, and shown."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": value}))
    with pytest.raises(CheckpointError) as caught:
        read_config(tmp_path)
    (problem,) = caught.value.problems
    assert problem.fault is CheckpointFault.NO_ARCHITECTURE and problem.file == "config.json" and problem.actual


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    """A key given twice means something else to every parser."""
    (tmp_path / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError) as caught:
        read_json_file(tmp_path, "config.json")
    assert caught.value.problems[0].fault is CheckpointFault.DUPLICATE_KEY
