"""Headers, held against the safetensors library itself."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rtp_llm.checkpoint import DTYPES, DTYPES_BY_TORCH_NAME, CheckpointFault, read_catalog, torch_dtype_name
from rtp_llm.checkpoint.header import MAX_PROBLEMS, read_header
from tests.attacks.hostile import craft, entry

#: One file for each example is enough; tmp_path is shared between examples and every example overwrites its file.
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

NAMES = st.text(st.characters(categories=("L", "N", "P", "S"), max_codepoint=0x2FFF), min_size=1, max_size=12).filter(
    lambda s: s.isprintable() and s != "__metadata__"
)
SHAPES = st.lists(st.integers(0, 5), max_size=4)


def layout(tensors: dict[str, tuple[str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A valid header for ``tensors``, in this order, and the number of data bytes; F4 and F6 shapes get whole bytes."""
    header: dict[str, Any] = {}
    position = 0
    for name, (dtype, sizes) in tensors.items():
        shape = [*sizes, 8] if DTYPES[dtype].bits % 8 else sizes
        size = DTYPES[dtype].bits
        for n in shape:
            size *= n
        header[name] = entry(dtype, shape, [position, position + size // 8])
        position += size // 8
    return header, position


#: Two spellings of JSON: Python's own, and that of safetensors, whose entries are read in one step.
WIDELY: dict[str, Any] = {}
CLOSELY: dict[str, Any] = {"separators": (",", ":"), "ensure_ascii": False}

TENSORS = st.dictionaries(NAMES, st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6)


@SETTINGS
@given(
    tensors=TENSORS,
    metadata=st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3),
    spaces=st.integers(0, 3),
    written=st.sampled_from([WIDELY, CLOSELY]),
)
def test_valid_headers_agree_with_safetensors(
    tmp_path: Path, tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str], spaces: int, written: dict[str, Any]
) -> None:
    """Any dtype, scalars, empty tensors, any printable name, padding, any spelling: catalogue and library say the same of each
    tensor, down to its bytes."""
    header, size = layout(tensors)
    raw = json.dumps({"__metadata__": metadata} | header, **written).encode() + b" " * spaces
    data = bytes(i * 7 % 251 for i in range(size))
    content = len(raw).to_bytes(8, "little") + raw + data
    (tmp_path / "model.safetensors").write_bytes(content)
    catalog = read_catalog(tmp_path)
    assert catalog.problems == ()
    assert dict(catalog.files[0].metadata) == metadata
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in safetensors.deserialize(content)}
    assert {t.name: (t.dtype, t.shape, content[t.start : t.stop]) for t in catalog.tensors} == theirs


@SETTINGS
@given(data=st.data())
def test_mutated_files_are_judged_as_safetensors_does(tmp_path: Path, data: st.DataObject) -> None:
    """One byte changed, added or removed anywhere: the catalogue never raises, and what it accepts the library
    accepts too, with the same tensors."""
    header, size = layout({"a": ("BF16", [2, 3]), "b.scale": ("F32", []), "c": ("U8", [4])})
    raw = json.dumps({"__metadata__": {"format": "pt"}} | header, **data.draw(st.sampled_from([WIDELY, CLOSELY]))).encode()
    content = bytearray(len(raw).to_bytes(8, "little") + raw + bytes(size))
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["change", "insert", "remove", "cut", "swap"]))
    byte = data.draw(st.one_of(st.sampled_from(list(b'{}[]",:0129-. \\e')), st.integers(0, 255)))
    if kind == "change":
        content[at] = byte
    elif kind == "insert":
        content.insert(at, byte)
        content[0] += at >= 8  # so that the header's length still fits, and deeper checks are reached
    elif kind == "remove":
        del content[at]
        content[0] -= at >= 8
    elif kind == "swap":
        other = data.draw(st.integers(0, len(content) - 1))
        content[at], content[other] = content[other], content[at]
    else:
        del content[at:]
    (tmp_path / "model.safetensors").write_bytes(bytes(content))
    catalog = read_catalog(tmp_path)
    if catalog.problems:
        assert all(p.file == "model.safetensors" and str(p).isprintable() for p in catalog.problems)
        return
    theirs = {name: (info["dtype"], tuple(info["shape"]), bytes(info["data"])) for name, info in safetensors.deserialize(bytes(content))}
    assert {t.name: (t.dtype, t.shape, bytes(content[t.start : t.stop])) for t in catalog.tensors} == theirs


@SETTINGS
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda c: st.lists(c, max_size=3) | st.dictionaries(st.text(max_size=4), c, max_size=3),
        max_leaves=8,
    )
)
def test_any_json_as_entry_is_a_problem(tmp_path: Path, value: object) -> None:
    """Any JSON value in place of an entry gives problems, never an exception."""
    craft(tmp_path / "model.safetensors", {"w": value})
    assert read_catalog(tmp_path).problems


def test_torch_dtypes_round_trip(tmp_path: Path) -> None:
    """Every dtype that safetensors can save from torch is read back with the name that our table gives it."""
    saved: dict[str, torch.Tensor] = {}
    for torch_name, info in DTYPES_BY_TORCH_NAME.items():
        saved[info.name] = torch.zeros(32, dtype=torch.uint8).view(getattr(torch, torch_name)).reshape(2, -1)
    safetensors.torch.save_file(saved, tmp_path / "model.safetensors")
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert {t.name: t.dtype for t in catalog.tensors} == {name: name for name in saved}
    for t in catalog.tensors:
        assert t.shape == (2, 128 // DTYPES[t.dtype].bits)
    assert {torch_dtype_name(d) for d in DTYPES} - {None} == set(DTYPES_BY_TORCH_NAME)


def test_the_table_has_every_dtype_of_safetensors() -> None:
    """The library's own list stands in its message on an unknown dtype; ours is the same."""
    raw = json.dumps({"w": entry("NONE", [0], [0, 0])}).encode()
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.deserialize(len(raw).to_bytes(8, "little") + raw)
    message = str(caught.value)
    assert "BF16" in message, message
    assert set(DTYPES) == {word.strip("`,. ") for word in message.split("expected one of ")[1].split(" at ")[0].split()}


def test_all_problems_of_a_header_are_listed_at_once(tmp_path: Path) -> None:
    """Three tensors wrong in three ways give three problems, each with expected and actual."""
    craft(
        tmp_path / "model.safetensors",
        {"a": entry("F32", [4], [0, 4]), "b": entry("F3", [4], [4, 8]), "c": entry("U8", [-4], [8, 12]), "d": entry("U8", [4], [12, 16])},
        16,
    )
    problems = read_catalog(tmp_path).problems
    faults = {p.tensor: p.fault for p in problems}
    assert faults == {"a": CheckpointFault.SIZE_MISMATCH, "b": CheckpointFault.UNKNOWN_DTYPE, "c": CheckpointFault.BAD_SHAPE}
    assert all(p.expected and p.actual for p in problems)
    assert "16 bytes (F32 [4])" in str(next(p for p in problems if p.tensor == "a"))


def test_entries_may_stand_in_any_order(tmp_path: Path) -> None:
    """safetensors sorts entries by their offsets; so do we."""
    craft(tmp_path / "model.safetensors", {"b": entry("U8", [4], [4, 8]), "a": entry("U8", [4], [0, 4])}, 8)
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert [(t.name, t.stop - t.start) for t in catalog.tensors] == [("a", 4), ("b", 4)]
    assert catalog.tensors[0].stop == catalog.tensors[1].start


def test_problems_of_one_file_are_bounded(tmp_path: Path) -> None:
    """Past a thousand findings the file is given up, and says so."""
    craft(tmp_path / "w.safetensors", {f"t{i}": {} for i in range(MAX_PROBLEMS + 10)})
    header = read_header(tmp_path / "w.safetensors", "w.safetensors")
    assert len(header.problems) == MAX_PROBLEMS + 1
    assert header.problems[-1].fault is CheckpointFault.TOO_MANY_PROBLEMS
    assert not header.complete


@pytest.mark.parametrize(
    "strange",
    [
        '"a":{"dtype":"U8","shape":[01],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}',
        '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,99999999999999999999]}',
        '"a":{"dtype":"U8","shape":[0,9999999999,9999999999],"data_offsets":[0,0]}',
        '"a":{"dtype":"U8","shape":[' + ",".join("1" * 65) + '],"data_offsets":[0,1]}',
        '"a":{"dtype":"Z9","shape":[1],"data_offsets":[0,1]}',
        '"a":{"dtype":"u8","shape":[1],"data_offsets":[0,1]}',
        '"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
        '"' + "a" * 1025 + '":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
        '"\u200b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
        '"__metadata__":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},',
        '"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]} ,"b":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}',
    ],
)
def test_reading_in_one_step_changes_no_verdict(tmp_path: Path, strange: str) -> None:
    """An entry spelled as safetensors spells it, and the same with spaces, which is read piece by piece: the same tensors, and
    the same problems word by word."""
    found = []
    for spelled in (strange, strange.replace('"dtype":', '"dtype": ')):
        raw = ("{" + spelled + "}").encode()
        raw += b" " * (2048 - len(raw))  # positions in messages must not differ by the spaces
        (tmp_path / "file").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(2))
        header = read_header(tmp_path / "file", "file")
        words = [re.sub(r"position \d+|char \d+|column \d+", "", str(problem)) for problem in header.problems]
        found.append((words, header.tensors, header.complete))
    assert found[0] == found[1]
