"""torch files: every tensor is a byte range of the file, and nothing is executed."""

from __future__ import annotations

import io
import math
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rtp_llm.checkpoint import DTYPES, DTYPES_BY_TORCH_NAME, TensorInfo, read_catalog, torch_file
from rtp_llm.checkpoint import CheckpointFault as F
from tests.attacks.hostile import BIN, archive, torch_pickle


def from_bytes(content: bytes, info: TensorInfo) -> torch.Tensor:
    """The tensor that ``info`` describes, from the file's bytes alone: what a transport does."""
    dtype = getattr(torch, str(DTYPES[info.dtype].torch_name))
    if info.start == info.stop:
        return torch.empty(info.shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(content[info.start : info.stop]), dtype=torch.uint8).view(dtype)
    if info.strides is not None:
        return torch.as_strided(flat, info.shape, info.strides)
    return flat.reshape(*info.shape[:-1], info.shape[-1] // DTYPES[info.dtype].packed) if info.shape else flat.reshape(())


def example() -> dict[str, Any]:
    base = torch.randn(10, 6)
    state: dict[str, Any] = {
        "base": base,
        "tied": base,
        "transposed": base.t(),
        "rows": base[2:5],
        "columns": base[:, 1:3],
        "expanded": base[0].expand(4, 6),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "empty_view": base[5:5],
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    for torch_name in DTYPES_BY_TORCH_NAME:
        state[torch_name] = torch.arange(32, dtype=torch.uint8).remainder(2).view(getattr(torch, torch_name)).reshape(2, -1)
    return state


def assert_same(directory: Path, state: dict[str, Any]) -> None:
    catalog = read_catalog(directory)
    catalog.raise_for_problems()
    content = (directory / BIN).read_bytes()
    assert {t.name for t in catalog.tensors} == set(state)
    for info in catalog.tensors:
        got, want = from_bytes(content, info), state[info.name].detach()
        assert got.dtype == want.dtype and got.shape == want.shape, info
        assert bytes_of(got) == bytes_of(want), info


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def test_byte_ranges_are_the_tensors(tmp_path: Path) -> None:
    """Views, tied, transposed, expanded, scalar and empty tensors of every dtype: the bytes in the file are the tensor."""
    state = example()
    torch.save(state, tmp_path / BIN)
    assert_same(tmp_path, state)
    by_name = read_catalog(tmp_path).by_name()
    assert by_name["base"].strides is None and by_name["transposed"].strides == (1, 6)
    assert (by_name["base"].start, by_name["base"].stop) == (by_name["tied"].start, by_name["tied"].stop)


def test_positions_by_fake_tensors_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch leaves no position for the meta device, FakeTensorMode gives the same catalogue."""
    torch.save(example(), tmp_path / BIN)
    expected = read_catalog(tmp_path).tensors
    plain, modes = torch_file._torch_load, []

    def older_torch(path: Path, mode: Any) -> Any:
        state = plain(path, mode)
        modes.append(type(mode).__name__)
        if len(modes) == 1:
            for value in state.values():
                value.untyped_storage().__dict__.pop("_checkpoint_offset", None)
        return state

    monkeypatch.setattr(torch_file, "_torch_load", older_torch)
    assert read_catalog(tmp_path).tensors == expected
    assert modes == ["nullcontext", "FakeTensorMode"]


def test_storage_alignment_and_no_checksums(tmp_path: Path) -> None:
    """Files that torch wrote with another alignment and without checksums are read as well."""
    from torch.utils.serialization import config

    state = {"a": torch.randn(3, 5), "b": torch.randn(7)}
    with config.patch({"save.storage_alignment": 4096, "save.compute_crc32": False}):
        torch.save(state, tmp_path / BIN)
    assert_same(tmp_path, state)
    assert read_catalog(tmp_path).by_name()["b"].start % 4096 == 0


def test_state_dict_of_a_module(tmp_path: Path) -> None:
    """What ``module.state_dict()`` gives, with its ``_metadata``, has tensors and nothing else."""
    state = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).state_dict()
    torch.save(state, tmp_path / BIN)
    assert_same(tmp_path, dict(state))
    assert read_catalog(tmp_path).notes == ()


@pytest.mark.parametrize("key", ["state_dict", "model", "module", "model_state_dict"])
def test_nested_state_dict(tmp_path: Path, key: str) -> None:
    """A state dict beside other things is used when only one key can be meant, with a note."""
    torch.save({key: {"w": torch.ones(3)}, "epoch": 3}, tmp_path / BIN)
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert [t.name for t in catalog.tensors] == ["w"]
    assert [n.fault for n in catalog.notes if n.fault is F.NESTED_STATE_DICT]


def test_ambiguous_nesting_is_refused(tmp_path: Path) -> None:
    """Two state dicts in one file: neither is chosen."""
    torch.save({"model": {"w": torch.ones(3)}, "state_dict": {"w": torch.zeros(3)}}, tmp_path / BIN)
    (problem,) = read_catalog(tmp_path).problems
    assert problem.fault is F.BAD_PICKLE and "model" in str(problem)


def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    """Numbers beside tensors are noted; keys that are no names are problems."""
    torch.save({"w": torch.ones(3), "step": 7, 5: torch.ones(1)}, tmp_path / BIN)
    catalog = read_catalog(tmp_path)
    assert [(n.fault, n.tensor) for n in catalog.notes if n.fault is F.NOT_A_TENSOR] == [(F.NOT_A_TENSOR, "step")]
    assert [(p.fault, p.tensor) for p in catalog.problems] == [(F.BAD_NAME, "5")]


def test_tensors_that_are_no_byte_range(tmp_path: Path) -> None:
    """Sparse, meta, conjugated and complex128 tensors are refused by name."""
    state = {
        "w": torch.ones(3),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(2, device="meta"),
        "conjugated": torch.ones(2, dtype=torch.complex64).conj(),
        "wide": torch.ones(2, dtype=torch.complex128),
    }
    torch.save(state, tmp_path / BIN)
    found = {p.tensor: p.fault for p in read_catalog(tmp_path).problems}
    assert found == {
        "sparse": F.UNSUPPORTED_TENSOR,
        "meta": F.UNSUPPORTED_TENSOR,
        "conjugated": F.UNSUPPORTED_TENSOR,
        "wide": F.UNKNOWN_DTYPE,
    }


def test_torchscript_and_legacy_files(tmp_path: Path) -> None:
    """Programs and the format of before torch 1.6 are refused, and the message says how to convert."""
    torch.save({"w": torch.ones(3)}, tmp_path / BIN, _use_new_zipfile_serialization=False)
    (problem,) = read_catalog(tmp_path).problems
    assert problem.fault is F.LEGACY_PICKLE and "save_file" in str(problem.fix)
    archive(tmp_path / BIN, torch_pickle())
    with zipfile.ZipFile(tmp_path / BIN, "a") as z:
        z.writestr("archive/constants.pkl", b"")
    (problem,) = read_catalog(tmp_path).problems
    assert problem.fault is F.BAD_ARCHIVE and "TorchScript" in problem.what


def test_hand_made_archive_is_read(tmp_path: Path) -> None:
    """The attacks' archive without its attack is valid: they fail for what they attack and nothing else."""
    archive(tmp_path / BIN, torch_pickle(), storage=torch.arange(4.0).numpy().tobytes())
    assert_same(tmp_path, {"w": torch.arange(4.0)})


def test_sharded_by_index(tmp_path: Path) -> None:
    """``pytorch_model.bin.index.json`` is an allow-list as well."""
    for i in (1, 2):
        torch.save({f"w{i}": torch.full((2,), float(i)), "stale": torch.ones(1)}, tmp_path / f"pytorch_model-0000{i}-of-00002.bin")
    names = ", ".join(f'"w{i}": "pytorch_model-0000{i}-of-00002.bin"' for i in (1, 2))
    (tmp_path / "pytorch_model.bin.index.json").write_text(f'{{"weight_map": {{{names}}}}}')
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert [t.name for t in catalog.tensors] == ["w1", "w2"]
    assert {n.fault for n in catalog.notes} == {F.OUTSIDE_INDEX}


def _saved() -> bytes:
    stream = io.BytesIO()
    torch.save(OrderedDict(a=torch.randn(3, 2), b=torch.arange(5), c=torch.tensor(1.0)), stream)
    return stream.getvalue()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_files_never_crash(tmp_path: Path, data: st.DataObject) -> None:
    """A byte changed, or the end cut, anywhere in the archive or its pickle gives problems or a catalogue whose ranges
    lie in the file; never an exception."""
    content = bytearray(_saved())
    begin = content.index(b"\x80\x02")
    stop = content.index(b"PK\x07\x08")
    at = data.draw(st.one_of(st.integers(0, len(content) - 1), st.integers(begin, stop)))
    content[at] = data.draw(st.one_of(st.integers(0, 255), st.sampled_from(list(b"(.0]}tRQbcqX)"))))
    if data.draw(st.integers(0, 9)) == 0:
        del content[at:]
    (tmp_path / BIN).write_bytes(bytes(content))
    catalog = read_catalog(tmp_path)
    for info in catalog.tensors:
        assert 0 <= info.start <= info.stop <= len(content)
        if info.strides is None:
            assert info.nbytes * 8 == math.prod(info.shape) * DTYPES[info.dtype].bits
    for problem in catalog.problems:
        assert str(problem).isprintable()
