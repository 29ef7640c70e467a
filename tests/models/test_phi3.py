"""What is Phi-3's own: matrices that are one in the file, and the names that its files have had for rotary parameters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, ParallelConfig, build_plan, export_checkpoint, load_model
from rtp_llm.errors import ConfigError, RtpLlmError
from rtp_llm.models.phi3.config import parse_config
from tests.models.decoders import configured
from tests.models.reference import distance, make, token_ids
from tests.support.ranks import run_ranks

CPU = LoadConfig(device="cpu")
#: Multi-head, so that six heads make two ranks.
VARIANT = "phi3-multi-head-tied"


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}


def test_the_export_is_the_source(tmp_path: Path) -> None:
    """Matrices that the model holds apart and divided come back as one, byte for byte."""
    make(*configured("phi3"), tmp_path / "source")
    out = export_checkpoint(load_model(tmp_path / "source", load=CPU), tmp_path / "out")
    assert digests(out) == digests(tmp_path / "source")


def export_in_ranks(source: str, out: str) -> None:
    export_checkpoint(load_model(source, load=CPU), out)


def test_two_ranks_export_the_source(tmp_path: Path) -> None:
    """So do the halves of two real ranks."""
    make(*configured(VARIANT), tmp_path / "source")
    run_ranks(2, export_in_ranks, str(tmp_path / "source"), str(tmp_path / "out"))
    assert digests(tmp_path / "out") == digests(tmp_path / "source")


def test_a_rank_reads_its_rows_alone(tmp_path: Path) -> None:
    """Of each fused matrix a rank's reads are its own rows of each part: half the bytes, none twice, and both ranks' are all."""
    make(*configured(VARIANT), tmp_path)
    boxes: dict[str, set[tuple[int, int]]] = {}
    for rank in range(2):
        fused = [
            d
            for d in build_plan(tmp_path, ParallelConfig(2, rank)).deliveries
            if d.tensor.name.endswith(("qkv_proj.weight", "gate_up_proj.weight"))
        ]
        assert sum(d.nbytes for d in fused) == sum({d.tensor.name: d.tensor.nbytes for d in fused}.values()) // 2
        assert all(d.passes for d in fused)
        for d in fused:
            boxes.setdefault(d.tensor.name, set()).add(d.raw_box[0])
    assert boxes["model.layers.0.self_attn.qkv_proj.weight"] == {(24 * i, 24 * (i + 1)) for i in range(6)}
    assert boxes["model.layers.1.mlp.gate_up_proj.weight"] == {(48 * i, 48 * (i + 1)) for i in range(4)}


def test_a_fused_matrix_of_other_sizes_is_refused(tmp_path: Path) -> None:
    """Rows that cannot be divided between the parts are told, with the parts; rows that can be, and are too many, as a shape."""
    make(*configured("phi3"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"num_key_value_heads": 2}))
    with pytest.raises(RtpLlmError, match=r"does not hold q, k, v one above another, as 3:1:1 .*qkv_proj\.weight"):
        load_model(tmp_path, load=CPU)
    path.write_text(json.dumps(config | {"intermediate_size": 90}))
    with pytest.raises(RtpLlmError, match=r"gate_up_proj\.weight.*expected \[90, 48\], found \[96, 48\]"):
        load_model(tmp_path, load=CPU)


@pytest.mark.parametrize("old", ["su", "yarn"])
def test_longrope_by_its_old_names(old: str, tmp_path: Path) -> None:
    """Published files say ``su`` (or ``yarn``) under ``rope_scaling``: the same model, before and beyond the original length."""
    reference = make(*configured("phi3-longrope-partial"), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    published = {"type": old, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    path.write_text(json.dumps(config | {"rope_scaling": published, "rope_theta": rope["rope_theta"], "partial_rotary_factor": 0.5}))
    model = load_model(tmp_path, load=CPU).model
    for tokens in (12, 24):
        with torch.inference_mode():
            assert distance(model(token_ids(tokens=tokens)), reference(token_ids(tokens=tokens)).logits) < 1e-4


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.*default or longrope"),
        ({"rope_scaling": {"type": "su"}}, "short_factor"),
        ({"partial_rotary_factor": 1.5}, "at most 1.0"),
        ({"sliding_window": 0}, "sliding_window"),
    ],
)
def test_what_the_family_does_not_know_is_refused(fields: dict[str, Any], word: str) -> None:
    """As transformers' class refuses them, or cannot run them."""
    with pytest.raises(ConfigError, match=word):
        parse_config(fields, ())
