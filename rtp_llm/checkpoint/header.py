"""Headers of safetensors files, checked in one pass and without torch.

The format: 8 bytes of little-endian header length, that many bytes of JSON, then the tensors' bytes with no gap and
no tail.  Checks follow ``Metadata::validate`` of safetensors' ``tensor.rs``, and refuse two things that it allows: a
name that occurs twice, and an unknown field (it could change the meaning of the bytes).

The JSON is parsed entry by entry rather than as one value: a hostile header of 100 MB would otherwise take
gigabytes of empty lists, or raise a recursion error.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint.catalog import FileInfo, TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import LFS_PREFIX, MAX_WIDE_BYTES, finding, lfs_problem, open_regular, os_problem, read_exactly, shown
from rtp_llm.errors import CheckpointError, Problem

#: ``MAX_HEADER_SIZE`` of safetensors.
MAX_HEADER_BYTES = 100_000_000

#: Bytes of the header's length, before the header.
LENGTH_BYTES = 8

#: All of DeepSeek-V3 (92,000) in one file; at about 400 bytes and 5 microseconds each this bounds memory near 40 MB and
#: time near half a second.
MAX_TENSORS = 100_000

#: Characters of one entry: 64 sizes and 2 offsets of up to 20 digits each, three field names, and room for spaces.
MAX_ENTRY = 4096

#: ``torch`` itself stops at 64 dimensions.
MAX_RANK = 64

#: Longest name of a tensor; real ones stay under 120 characters.
MAX_NAME = 1024

#: Characters of all of ``__metadata__``, as the file spells it; training tools that keep their settings and a picture
#: there stay under 2 MB.
MAX_METADATA = 4_000_000

#: Characters of a name that are read: far more than allowed, so that the message can say its length.
_MOST_OF_A_NAME = 2_000_000

#: Sizes and positions must fit the signed 64-bit integers of file offsets and of torch.
MAX_INT = 2**63

#: A file with more findings is not read further: more messages would only fill memory.
MAX_PROBLEMS = 1000

_FIELDS = {"dtype", "shape", "data_offsets"}
_STRINGS = json.JSONDecoder()
_PAIRS = json.JSONDecoder(object_pairs_hook=tuple)
_SPACES = frozenset(" \t\n\r")
_space = re.compile(r"[ \t\n\r]*").match

#: A tensor's whole entry as safetensors writes it, so that most entries take one match.  Other entries are parsed piece by
#: piece.
_INT = r"(?:0|[1-9][0-9]{0,18})"
_usual_entry = re.compile(
    rf'"(?!__metadata__")([^"\\\x00-\x1f]{{1,{MAX_NAME}}})":'
    rf'\{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_INT}(?:,{_INT}){{0,{MAX_RANK - 1}}})?)\],"data_offsets":\[({_INT}),({_INT})\]\}}'
).match


@dataclass(slots=True)
class Header:
    """The header of one file: its tensors in order of their bytes, and all problems.

    ``info`` is None if the file could not be read.  ``complete`` is False if parsing had to stop, so tensors may be missing
    from ``tensors``.
    """

    info: FileInfo | None = None
    tensors: list[TensorInfo] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    complete: bool = True


class _Stop(Exception):
    """Parsing cannot go on; carries the reason."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem


def read_header(path: Path, file: str) -> Header:
    """The header of the safetensors file at ``path``; ``file`` is its name in messages.  Never raises for content."""
    header = Header()
    try:
        with open_regular(path, file) as (fd, size):
            text = _header_text(fd, size, file)
    except CheckpointError as error:
        header.problems += error.problems
    except _Stop as stop:
        header.problems.append(stop.problem)
    except OSError as error:
        header.problems.append(os_problem(error, path, file))
    else:
        base = LENGTH_BYTES + text.length
        metadata = _parse(text.value, base, file, header)
        header.info = FileInfo(file, "safetensors", size, metadata)
        header.tensors.sort(key=lambda t: (t.start, t.stop))
        _check_layout(header, base, size, file)
    header.complete = header.complete and header.info is not None
    return header


@dataclass(frozen=True, slots=True)
class _Text:
    value: str
    length: int


def _header_text(fd: int, size: int, file: str) -> _Text:
    first = read_exactly(fd, max(LENGTH_BYTES, len(LFS_PREFIX)), 0)
    if first.startswith(LFS_PREFIX):
        raise _Stop(lfs_problem(file))
    if size < LENGTH_BYTES:
        raise _stop(
            CheckpointFault.TRUNCATED_FILE, "no room for a header", file, expected=f"at least {LENGTH_BYTES} bytes", actual=f"{size} bytes"
        )
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > size - LENGTH_BYTES:
        raise _stop(
            CheckpointFault.HEADER_BEYOND_FILE,
            "the header is longer than the file, or this is no safetensors file",
            file,
            expected=f"a header of at most {size - LENGTH_BYTES} bytes",
            actual=f"{length} bytes",
        )
    if length > MAX_HEADER_BYTES:
        raise _stop(
            CheckpointFault.HEADER_TOO_LARGE,
            "the header is too large",
            file,
            expected=f"at most {MAX_HEADER_BYTES} bytes",
            actual=f"{length} bytes",
        )
    raw = read_exactly(fd, length, LENGTH_BYTES)
    if len(raw) < length:
        raise _stop(
            CheckpointFault.TRUNCATED_FILE,
            "the file became shorter",
            file,
            expected=f"{length} bytes of header",
            actual=f"{len(raw)} bytes",
        )
    if length > MAX_WIDE_BYTES and not raw.isascii():
        what = "the header is too large for text beyond ASCII"
        raise _stop(CheckpointFault.HEADER_TOO_LARGE, what, file, expected=f"at most {MAX_WIDE_BYTES} bytes", actual=f"{length} bytes")
    try:
        return _Text(raw.decode("utf-8"), length)
    except UnicodeDecodeError as error:
        actual = f"byte {raw[error.start]:#04x} at header position {error.start}"
        raise _stop(CheckpointFault.BAD_HEADER, "the header is not UTF-8 text", file, expected="UTF-8", actual=actual) from error


class _Cursor:
    """A position in the header's text, and a parser of JSON's outer levels."""

    __slots__ = ("file", "position", "text")

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file, self.position = text, file, 0

    def take(self, allowed: str) -> str:
        """The next character that is not white space, which must be one of ``allowed``."""
        char = self.peek()
        if not char or char not in allowed:
            wanted = " or ".join(allowed)
            where = f"{shown(char) if char else 'the end'} at header position {self.position}"
            raise _stop(CheckpointFault.BAD_HEADER, "the header is not a JSON object of objects", self.file, expected=wanted, actual=where)
        self.position += 1
        return char

    def peek(self) -> str:
        """The next character that is not white space, or ``""`` at the end."""
        text, position = self.text, self.position
        if text[position : position + 1] in _SPACES:
            self.position = position = _space(text, position).end()  # type: ignore[union-attr]
        return text[position : position + 1]

    def string(self, what: str, most: int) -> str:
        """The next string, which takes at most ``most`` characters in the file."""
        if self.peek() != '"':
            self.take('"')
        text, start = self.text, self.position
        stop = text.find('"', start + 1, start + most + 2)
        try:
            if stop > 0 and text[stop - 1] != "\\":
                value, self.position = _STRINGS.raw_decode(text, start)
            else:
                # A piece of bounded length: escapes can make a string four times as large in memory as in the file.
                value, end = _STRINGS.raw_decode(text[start : self._string_end(most)])
                self.position += end
        except ValueError as error:
            raise _stop(
                CheckpointFault.BAD_HEADER,
                f"{what} is not a JSON string, or too long",
                self.file,
                expected=f"a string of at most {most} characters",
                actual=shown(str(error)),
            ) from error
        assert isinstance(value, str)
        return value

    def _string_end(self, most: int) -> int:
        """The position after the closing quote of the next string, or after ``most`` of its characters."""
        text, end, limit = self.text, self.position, self.position + most + 2
        while (end := text.find('"', end + 1, limit)) > 0:
            slashes = end
            while text[slashes - 1] == "\\":
                slashes -= 1
            if (end - slashes) % 2 == 0:
                return end + 1
        return limit

    def flat_object(self, name: str) -> tuple[tuple[str, Any], ...]:
        """The pairs of the next object, which is short and holds no other object."""
        opening = self.peek()
        stop = self.text.find("}", self.position, self.position + MAX_ENTRY) + 1
        if opening != "{" or not stop:
            raise _Stop(_entry_problem(self.file, name, "another value, or one too long"))
        piece = self.text[self.position : stop]
        try:
            pairs, end = _PAIRS.raw_decode(piece)
        except (ValueError, RecursionError) as error:
            raise _Stop(_entry_problem(self.file, name, shown(str(error)))) from error
        if end != len(piece):
            raise _Stop(_entry_problem(self.file, name, "an object that ends early"))
        self.position = stop
        assert isinstance(pairs, tuple)
        return pairs


def _parse(text: str, base: int, file: str, header: Header) -> tuple[tuple[str, str], ...]:
    """Fill ``header.tensors`` and ``header.problems`` from the JSON ``text``; returns ``__metadata__``, in the file's order."""
    metadata: dict[str, str] = {}
    seen: set[str] = set()
    wide = 0
    cursor = _Cursor(text, file)
    try:
        # Every valid entry has one: a quick check before the entries are parsed.
        if (count := text.count('"data_offsets"')) > MAX_TENSORS:
            raise _stop(CheckpointFault.TOO_MANY_TENSORS, "too many tensors", file, expected=f"at most {MAX_TENSORS}", actual=f"{count}")
        cursor.take("{")
        more = cursor.peek() != "}" or cursor.take("}") != "}"
        while more:
            usual = _usual_entry(text, cursor.position)
            if usual is not None:
                name, dtype, shape, start, stop = usual.groups()
                cursor.position = usual.end()
            else:
                name = cursor.string("a name", _MOST_OF_A_NAME)
                cursor.take(":")
            if name in seen:
                _blame(header, finding(CheckpointFault.DUPLICATE_KEY, "the name stands twice in the header", file, name), file)
            seen.add(name)
            wide += 0 if name.isascii() else len(name)
            if wide > MAX_WIDE_BYTES:
                what = "the names are too long for text beyond ASCII"
                raise _stop(CheckpointFault.HEADER_TOO_LARGE, what, file, name, f"at most {MAX_WIDE_BYTES} characters in all", "more")
            if usual is not None:
                sizes = tuple(map(int, shape.split(","))) if shape else ()
                _add(header, _tensor(name, dtype, sizes, (int(start), int(stop)), base, file), file)
            elif name == "__metadata__":
                metadata = _metadata(cursor)
            else:
                _add(header, _entry(name, cursor.flat_object(name), base, file), file)
            more = cursor.take(",}") == ","
        if cursor.peek():
            raise _stop(CheckpointFault.BAD_HEADER, "text after the header's object", file, expected="spaces", actual=shown(cursor.peek()))
    except _Stop as stop:
        header.problems.append(stop.problem)
        header.complete = False
    return tuple(metadata.items())


def _add(header: Header, found: TensorInfo | Problem, file: str) -> None:
    if isinstance(found, TensorInfo):
        if len(header.tensors) >= MAX_TENSORS:
            raise _stop(CheckpointFault.TOO_MANY_TENSORS, "too many tensors", file, expected=f"at most {MAX_TENSORS}", actual="more")
        header.tensors.append(found)
    else:
        header.complete = False
        _blame(header, found, file)


def _blame(header: Header, problem: Problem, file: str) -> None:
    header.problems.append(problem)
    if len(header.problems) >= MAX_PROBLEMS:
        raise _stop(CheckpointFault.TOO_MANY_PROBLEMS, f"{MAX_PROBLEMS} problems; the rest of the file was not looked at", file)


def _metadata(cursor: _Cursor) -> dict[str, str]:
    """The ``__metadata__`` object, strings only; safetensors also lets ``null`` pass."""
    if cursor.text.startswith("null", cursor.position):
        cursor.position += 4
        return {}
    result: dict[str, str] = {}
    if cursor.peek() != "{":
        raise _stop(
            CheckpointFault.BAD_METADATA,
            "not an object",
            cursor.file,
            "__metadata__",
            expected="an object of strings",
            actual=shown(cursor.peek()),
        )
    cursor.take("{")
    left = cursor.position + MAX_METADATA
    more = cursor.peek() != "}" or cursor.take("}") != "}"
    while more:
        key = cursor.string("a key of __metadata__", max(0, left - cursor.position))
        cursor.take(":")
        if cursor.peek() != '"':
            what = f"the value of {shown(key)} is not a string"
            raise _stop(CheckpointFault.BAD_METADATA, what, cursor.file, "__metadata__", expected="a string", actual=shown(cursor.peek()))
        result[key] = cursor.string("a value of __metadata__", max(0, left - cursor.position))
        more = cursor.take(",}") == ","
    return result


def _entry(name: str, pairs: tuple[tuple[str, Any], ...], base: int, file: str) -> TensorInfo | Problem:
    """The tensor that a header entry describes, or what is wrong with it."""
    fields = dict(pairs)
    if len(pairs) != len(_FIELDS) or fields.keys() != _FIELDS:
        return _entry_problem(file, name, ", ".join(shown(key) for key, _ in pairs[:8]) or "nothing")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if problem := name_problem(name, file):
        return problem
    if type(dtype) is not str:
        return _dtype_problem(file, name, str(dtype))
    if not _is_sizes(shape) or len(shape) > MAX_RANK:
        return finding(CheckpointFault.BAD_SHAPE, "not a shape", file, name, f"at most {MAX_RANK} whole numbers from 0", shown(str(shape)))
    if not _is_sizes(offsets) or len(offsets) != 2:
        return _offsets_problem(file, name, str(offsets))
    return _tensor(name, dtype, tuple(shape), (offsets[0], offsets[1]), base, file)


def _tensor(name: str, dtype: str, shape: tuple[int, ...], offsets: tuple[int, int], base: int, file: str) -> TensorInfo | Problem:
    """The tensor of ``dtype`` and ``shape`` (none negative) at bytes ``offsets`` of the data, or what is wrong with it."""
    start, stop = offsets
    if problem := name_problem(name, file):
        return problem
    known = DTYPES.get(dtype)
    if known is None:
        return _dtype_problem(file, name, dtype)
    if start > stop:
        return _offsets_problem(file, name, str([start, stop]))
    bits = prod(shape) * known.bits
    # A zero in the shape must not hide an overflow of the other sizes.
    most = bits or prod(size for size in shape if size) * known.bits
    if most >= MAX_INT or stop + base >= MAX_INT:
        return finding(
            CheckpointFault.OVERFLOW,
            "a size does not fit 63 bits",
            file,
            name,
            "less than 2**63",
            shown(f"shape {list(shape)}, data_offsets {[start, stop]}"),
        )
    if bits != (stop - start) * 8:
        stated = f"{dtype} {list(shape)}"
        wanted = f"{bits // 8} bytes ({stated})" if bits % 8 == 0 else f"whole bytes ({stated} has {bits} bits)"
        actual = f"{stop - start} bytes ({[start, stop]})"
        return finding(CheckpointFault.SIZE_MISMATCH, "dtype x shape is not the byte range", file, name, wanted, actual)
    return TensorInfo(name, dtype, shape, file, base + start, base + stop)


def _dtype_problem(file: str, name: str, actual: str) -> Problem:
    return finding(CheckpointFault.UNKNOWN_DTYPE, "unknown dtype", file, name, ", ".join(DTYPES), shown(actual))


def _offsets_problem(file: str, name: str, actual: str) -> Problem:
    return finding(CheckpointFault.BAD_OFFSETS, "not a byte range", file, name, "[start, stop], start <= stop", shown(actual))


def name_problem(name: str, file: str) -> Problem | None:
    """What is wrong with the name of a tensor, if anything."""
    if name and len(name) <= MAX_NAME and name.isprintable():
        return None
    expected = f"1 to {MAX_NAME} printable characters"
    return finding(CheckpointFault.BAD_NAME, "not a tensor's name", file, name, expected, f"{len(name)} characters, {shown(name)!r}")


def _is_sizes(value: object) -> bool:
    # bool is a subclass of int, but true is no size.
    return type(value) is list and all(type(n) is int and n >= 0 for n in value)


def _check_layout(header: Header, base: int, size: int, file: str) -> None:
    """The tensors' bytes, in order, must fill the file from the header's end to the file's end."""
    cursor, last = base, ""
    for tensor in header.tensors:
        if tensor.stop > size:
            what = "the file ends inside the tensor's bytes"
            end = max(t.stop for t in header.tensors)
            header.problems.append(
                finding(CheckpointFault.TRUNCATED_FILE, what, file, tensor.name, f"{end} bytes", f"{size} bytes", "download the file again")
            )
            return
        if tensor.start < cursor:
            actual = f"start {tensor.start}, inside {shown(last)}"
            header.problems.append(
                finding(CheckpointFault.OVERLAP, "the tensor shares bytes with another", file, tensor.name, f"start {cursor}", actual)
            )
        elif tensor.start > cursor and header.complete:
            what = "bytes before the tensor belong to none"
            header.problems.append(finding(CheckpointFault.GAP, what, file, tensor.name, f"start {cursor}", f"start {tensor.start}"))
        cursor, last = max(cursor, tensor.stop), tensor.name
        if len(header.problems) >= MAX_PROBLEMS:
            header.problems.append(
                finding(CheckpointFault.TOO_MANY_PROBLEMS, f"{MAX_PROBLEMS} problems; the rest of the file was not looked at", file)
            )
            return
    if cursor < size and header.complete:
        header.problems.append(
            finding(
                CheckpointFault.TRAILING_BYTES,
                "bytes after the last tensor",
                file,
                None,
                f"{cursor} bytes",
                f"{size} bytes",
                "download the file again",
            )
        )


def _stop(
    fault: CheckpointFault, what: str, file: str, tensor: str | None = None, expected: str | None = None, actual: str | None = None
) -> _Stop:
    return _Stop(finding(fault, what, file, tensor, expected, actual))


def _entry_problem(file: str, name: str, actual: str) -> Problem:
    return finding(CheckpointFault.BAD_ENTRY, "not a tensor's entry", file, name, "an object of dtype, shape, data_offsets", actual)
