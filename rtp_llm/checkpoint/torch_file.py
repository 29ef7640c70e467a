"""Catalogue of torch files (``.bin``, ``.pt``, ``.pth``): where each tensor's bytes are; no code of the file is executed.

``torch.save`` writes an uncompressed zip archive: ``<name>/data.pkl`` describes the tensors, ``<name>/data/<key>``
holds one storage each (torch/serialization.py, ``_save``).  ``torch.load(weights_only=True)`` interprets the pickle
on the meta device, so no data is read, and notes each storage's position in the file.  A position counts only if the
archive's directory has a record there that is long enough.  A tensor is then a byte range, and is read as those of
safetensors are.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from rtp_llm.checkpoint.catalog import FileInfo, TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES_BY_TORCH_NAME
from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import LFS_PREFIX, finding, lfs_problem, open_regular, os_problem, read_exactly, shown
from rtp_llm.checkpoint.header import Header, name_problem
from rtp_llm.errors import CheckpointError, Problem

if TYPE_CHECKING:
    import torch

#: torch's restricted unpickler is written in Python.  An operation takes about 1.5 microseconds, and may build an object.  A
#: tensor takes about 32 operations and 130 bytes: this is 7,800 tensors in one file, where shards hold hundreds, and half a
#: second.
MAX_OPERATIONS = 250_000
MAX_PICKLE_BYTES = 2_000_000

#: The archive's directory takes about 100 bytes for each storage; this is 40,000 of them in one file.
MAX_DIRECTORY_BYTES = 4_000_000

#: Keys under which training scripts put a state dict beside other things.
_NESTED = ("state_dict", "model_state_dict", "model", "module")

#: What interpreting a hostile pickle can raise: operators applied to the wrong operands raise any of these, and
#: torch's C++ archive reader raises RuntimeError.
_PICKLE_ERRORS = (
    pickle.UnpicklingError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    EOFError,
    ImportError,
    struct.error,
)

#: Top-level modules of names that torch's weights_only unpickler allows.
_MODULES = frozenset(("torch", "collections", "builtins", "__builtin__", "_codecs", "numpy"))
_PROTOCOLS = frozenset((b"\2", b"\3", b"\4", b"\5"))
_ZIP_START = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# The end record of a zip archive, its 64-bit locator, and the 64-bit end record (APPNOTE.TXT 4.3.14 to 4.3.16):
# the directory's size, the position of the 64-bit record, and the directory's size again.
_END = struct.Struct("<4s8xI6x")
_LOCATOR = struct.Struct("<8xQ4x")
_END64 = struct.Struct("<40xQ8x")
_UNSAFE_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")


def read_torch_file(path: Path, file: str) -> Header:
    """The tensors of the torch file at ``path``; ``file`` is its name in messages.  Never raises for content."""
    header = Header()
    try:
        with open_regular(path, file) as (fd, size):
            records = _storages(fd, size, file)
        header.info = FileInfo(file, "torch", size)
        _add_tensors(header, _state_dict(_load(path, file), file, header), records, file)
    except CheckpointError as error:
        header.problems += error.problems
    except OSError as error:
        header.problems.append(os_problem(error, path, file))
    header.complete = not header.problems
    return header


def _storages(fd: int, size: int, file: str) -> dict[int, int]:
    """Position -> length in bytes of each storage, from the archive's directory; raises CheckpointError."""
    start = read_exactly(fd, len(LFS_PREFIX), 0)
    if start.startswith(LFS_PREFIX):
        raise CheckpointError(lfs_problem(file))
    if start.startswith(b"\x80"):
        fix = "load it once with torch.load(weights_only=True) where you trust it, and save it with safetensors.torch.save_file"
        raise _error(
            CheckpointFault.LEGACY_PICKLE,
            "a plain pickle",
            file,
            expected="a zip archive of torch 1.6 or later",
            actual="a pickle",
            fix=fix,
        )
    if not start.startswith(_ZIP_START):
        raise _error(
            CheckpointFault.NOT_AN_ARCHIVE,
            "not a torch file",
            file,
            expected="a zip archive",
            actual="other bytes",
            fix="download it again",
        )
    with os.fdopen(os.dup(fd), "rb") as stream:
        try:
            _check_directory_size(stream.fileno(), size, file)
            with zipfile.ZipFile(stream) as archive:
                entries = archive.infolist()
                _check_records(entries, size, file)
        except (zipfile.BadZipFile, NotImplementedError, struct.error, UnicodeDecodeError, ValueError, EOFError) as error:
            if isinstance(error, CheckpointError):
                raise
            what = f"the archive cannot be read: {shown(str(error))}"
            raise _error(
                CheckpointFault.BAD_ARCHIVE,
                what,
                file,
                expected="an archive of torch.save",
                actual=f"{size} bytes",
                fix="download it again",
            ) from error
    for e in entries:
        if e.filename.count("/") == 1:
            _check_record(fd, e, size, file)
    return {_data_position(fd, e, size, file): e.file_size for e in entries if "/data/" in e.filename}


def _check_directory_size(fd: int, size: int, file: str) -> None:
    """Checks that the archive's directory is at the end of the file, and not too large to read."""
    tail = read_exactly(fd, _LOCATOR.size + _END.size, max(0, size - _LOCATOR.size - _END.size))
    signature, directory = _END.unpack(tail[-_END.size :]) if len(tail) >= _END.size else (b"", 0)
    if signature != b"PK\x05\x06":
        expected, actual = "the archive's end record in the last 22 bytes", f"other bytes at the end of {size} bytes"
        what = "the file is cut short, or goes on after the archive"
        raise _error(CheckpointFault.TRUNCATED_FILE, what, file, expected=expected, actual=actual, fix="download it again")
    if len(tail) == _LOCATOR.size + _END.size and tail.startswith(b"PK\x06\x07"):
        (position,) = _LOCATOR.unpack_from(tail)
        record = read_exactly(fd, _END64.size, position) if position < size else b""
        directory = _END64.unpack(record)[0] if len(record) == _END64.size else size
    if directory > MAX_DIRECTORY_BYTES:
        expected = f"at most {MAX_DIRECTORY_BYTES} bytes"
        raise _error(
            CheckpointFault.BAD_ARCHIVE, "the archive's directory is too large", file, expected=expected, actual=f"{directory} bytes"
        )


def _check_records(entries: list[zipfile.ZipInfo], size: int, file: str) -> None:
    """Checks the records: one description, nothing compressed, unique names, all inside the file."""
    names = [e.filename for e in entries]
    descriptions = [e for e in entries if e.filename.count("/") == 1 and e.filename.endswith("/data.pkl")]
    if len(set(names)) != len(names) or len(descriptions) != 1:
        actual = f"{len(descriptions)} of them among {len(set(names))} names in {len(names)} records"
        what = "not the records that torch.save writes"
        raise _error(CheckpointFault.BAD_ARCHIVE, what, file, expected="one record <name>/data.pkl, each name once", actual=actual)
    if any(n.endswith("/constants.pkl") for n in names):
        fix = "save the model's state_dict() instead of a scripted module"
        raise _error(CheckpointFault.BAD_ARCHIVE, "a TorchScript archive", file, expected="a state dict", actual="a program", fix=fix)
    for e in entries:
        if e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size or e.flag_bits & 1:
            actual = f"{shown(e.filename)}: {e.compress_size} bytes for {e.file_size}"
            what = "a record is compressed or encrypted"
            raise _error(CheckpointFault.COMPRESSED_ARCHIVE, what, file, expected="stored records, as torch.save writes", actual=actual)
    if descriptions[0].file_size > MAX_PICKLE_BYTES:
        expected, actual = f"at most {MAX_PICKLE_BYTES} bytes", f"{descriptions[0].file_size} bytes"
        fix = "save it in shards, or as safetensors"
        raise _error(CheckpointFault.BAD_PICKLE, "data.pkl is too large for a state dict", file, expected=expected, actual=actual, fix=fix)


def _check_record(fd: int, entry: zipfile.ZipInfo, size: int, file: str) -> None:
    """Checks the byte order or the size of the description, if ``entry`` is one of these."""
    kind = entry.filename.rpartition("/")[2]
    if kind == "byteorder":
        order = read_exactly(fd, min(entry.file_size, 16), _data_position(fd, entry, size, file))
        if order != b"little":
            raise _error(CheckpointFault.BIG_ENDIAN, "byte order", file, expected="little", actual=shown(order.decode("latin-1")))
    elif kind == "data.pkl":
        raw = read_exactly(fd, entry.file_size, _data_position(fd, entry, size, file))
        if raw[:1] != b"\x80" or raw[1:2] not in _PROTOCOLS:
            expected = "protocol 2, as torch.save writes, to 5"
            raise _error(CheckpointFault.BAD_PICKLE, "data.pkl is no binary pickle", file, expected=expected, actual=shown(repr(raw[:2])))
        _check_operations(raw, file)


def _check_operations(raw: bytes, file: str) -> None:
    """Checks that there are not too many operations, and none of a module that weights never need.

    torch decides what may be called; this only avoids importing torch for files that it would refuse.
    """
    operations = 0
    try:
        for operation, argument, _ in pickletools.genops(raw):
            operations += 1
            if operations > MAX_OPERATIONS:
                expected, fix = f"at most {MAX_OPERATIONS} operations", "save it in shards, or as safetensors"
                raise _error(CheckpointFault.BAD_PICKLE, "data.pkl is too long for a state dict", file, expected, "more", fix)
            if operation.name == "GLOBAL" and str(argument).partition(" ")[0].partition(".")[0] not in _MODULES:
                raise CheckpointError(_unsafe(str(argument).replace(" ", "."), file))
    except CheckpointError:
        raise
    except ValueError as error:  # an unknown operation, or the end before STOP; genops raises nothing else
        what = f"data.pkl is no pickle: {shown(str(error))}"
        raise _error(CheckpointFault.BAD_PICKLE, what, file, fix="download the file again") from error


def _data_position(fd: int, entry: zipfile.ZipInfo, size: int, file: str) -> int:
    """Where a record's bytes begin: after its local header, which has a variable length."""
    raw = read_exactly(fd, _LOCAL_HEADER.size, entry.header_offset)
    if len(raw) == _LOCAL_HEADER.size:
        signature, name, extra = _LOCAL_HEADER.unpack(raw)
        position = entry.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)
        if signature == _ZIP_START and position + entry.file_size <= size:
            return position
    expected, actual = f"{entry.file_size} bytes inside the file", f"a record at {entry.header_offset} of {size} bytes"
    raise _error(
        CheckpointFault.BAD_ARCHIVE, f"record {shown(entry.filename)} does not lie in the file", file, expected=expected, actual=actual
    )


def _load(path: Path, file: str) -> object:
    """The unpickled object with tensors on the meta device; raises CheckpointError."""
    try:
        state = _torch_load(path, nullcontext())
        tensors = _strided(state)
        if tensors and all(_position(v) is None for v in tensors):
            # Older torch notes positions under FakeTensorMode, not for map_location="meta".
            from torch._subclasses.fake_tensor import FakeTensorMode

            state = _torch_load(path, FakeTensorMode())
    except _PICKLE_ERRORS as error:
        raise CheckpointError(_pickle_problem(error, file)) from error
    except RecursionError as error:
        raise _error(CheckpointFault.BAD_PICKLE, "nested too deeply", file, expected="a state dict", actual="hundreds of levels") from error
    return state


def _torch_load(path: Path, mode: AbstractContextManager[object]) -> object:
    import torch

    with mode:
        return torch.load(str(path), map_location="meta", weights_only=True, mmap=True)


def _strided(state: object) -> list[torch.Tensor]:
    """The tensors with a storage in a state dict or one level below."""
    import torch

    outer = list(state.values()) if isinstance(state, Mapping) else []
    inner = [v for d in outer if isinstance(d, Mapping) for v in d.values()]
    return [v for v in outer + inner if isinstance(v, torch.Tensor) and v.layout == torch.strided]


def _position(tensor: torch.Tensor) -> int | None:
    position = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
    return position if isinstance(position, int) else None


def _pickle_problem(error: Exception, file: str) -> Problem:
    text = str(error)
    unsafe = _UNSAFE_GLOBAL.search(text)
    if unsafe:
        return _unsafe(unsafe[1].rstrip("."), file)
    # torch's message begins with a paragraph on weights_only; the reason is in the last lines.
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Check the documentation")]
    reason = shown(lines[-1]) if lines else type(error).__name__
    return finding(CheckpointFault.BAD_PICKLE, f"torch.load refuses it: {reason}", file=file, fix="download the file again")


def _unsafe(name: str, file: str) -> Problem:
    return finding(
        CheckpointFault.UNSAFE_PICKLE,
        f"the pickle asks for {shown(name)}, which is not needed for weights; nothing was executed",
        file=file,
        expected="tensors and plain containers",
        actual="code",
        fix="do not trust this checkpoint; ask for safetensors",
    )


def nesting_keys(state: Mapping[object, object]) -> list[str]:
    """The keys of state dicts inside of ``state``; none if ``state`` has tensors itself."""
    import torch

    if any(isinstance(v, torch.Tensor) for v in state.values()):
        return []
    return [k for k in _NESTED if isinstance(state.get(k), Mapping)]


def _state_dict(state: object, file: str, header: Header) -> Mapping[object, object]:
    """The state dict in the file; raises CheckpointError if there is none, or several."""
    import torch

    if isinstance(state, Mapping):
        if any(isinstance(v, torch.Tensor) for v in state.values()):
            return state
        nested = nesting_keys(state)
        if len(nested) == 1:
            what = f"the state dict under the key {nested[0]} is used"
            others = ", ".join(shown(str(k)) for k in list(state)[:5] if k != nested[0]) or "nothing"
            header.notes.append(
                finding(CheckpointFault.NESTED_STATE_DICT, what, file=file, expected="tensors", actual=f"beside it: {others}")
            )
            inner = state[nested[0]]
            assert isinstance(inner, Mapping)
            return inner
    actual = (
        f"{type(state).__name__} of {', '.join(shown(str(k)) for k in list(state)[:5]) or 'nothing'}"
        if isinstance(state, Mapping)
        else type(state).__name__
    )
    fix = "save model.state_dict() alone, or under the key state_dict"
    raise _error(CheckpointFault.BAD_PICKLE, "not a state dict", file, expected="a dict of tensors", actual=actual, fix=fix)


def _add_tensors(header: Header, state: Mapping[object, object], records: dict[int, int], file: str) -> None:
    import torch

    for name, value in state.items():
        if not isinstance(name, str):
            header.problems.append(
                finding(CheckpointFault.BAD_NAME, "not a tensor's name", file, shown(repr(name)), "a string", type(name).__name__)
            )
        elif problem := name_problem(name, file):
            header.problems.append(problem)
        elif not isinstance(value, torch.Tensor):
            header.notes.append(
                finding(CheckpointFault.NOT_A_TENSOR, "ignored: not a tensor", file, name, "a tensor", type(value).__name__)
            )
        else:
            found = _tensor(name, value, records, file)
            (header.tensors if isinstance(found, TensorInfo) else header.problems).append(found)  # type: ignore[arg-type]


def _tensor(name: str, value: torch.Tensor, records: dict[int, int], file: str) -> TensorInfo | Problem:
    import torch

    kind = str(value.dtype).removeprefix("torch.")
    known = DTYPES_BY_TORCH_NAME.get(kind)
    if known is None:
        return finding(CheckpointFault.UNKNOWN_DTYPE, "unknown dtype", file, name, ", ".join(DTYPES_BY_TORCH_NAME), kind)
    lazy = value.is_conj() or value.is_neg() or value.is_quantized
    plain = value.layout == torch.strided and not lazy
    position = _position(value) if plain else None
    if position is None or (known.packed > 1 and not (value.dim() and value.is_contiguous())):
        actual = "lazily conjugated, negated or quantised" if lazy else f"layout {value.layout}, no plain bytes in the file"
        return finding(CheckpointFault.UNSUPPORTED_TENSOR, "not a plain tensor", file, name, "a dense tensor stored in the file", actual)
    shape, strides = tuple(value.shape), tuple(value.stride())
    size = value.element_size()
    span = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    start = position + int(value.storage_offset()) * size
    stop = start + span * size
    held = records.get(position)
    if span and (held is None or stop - position > held):
        actual = f"bytes {start} to {stop}; the record there has {held or 0} bytes"
        return finding(
            CheckpointFault.BAD_ARCHIVE, "the tensor's bytes do not lie in its record", file, name, "bytes of one record", actual
        )
    if not span:
        start = stop = position
    if known.packed > 1:
        shape = (*shape[:-1], shape[-1] * known.packed)
    return TensorInfo(name, known.name, shape, file, start, stop, None if value.is_contiguous() else strides)


def _error(
    fault: CheckpointFault, what: str, file: str, expected: str | None = None, actual: str | None = None, fix: str | None = None
) -> CheckpointError:
    return CheckpointError(finding(fault, what, file=file, expected=expected, actual=actual, fix=fix))
