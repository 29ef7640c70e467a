"""Opens untrusted files: regular files only, no blocking, JSON of bounded size, names escaped for a terminal."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.errors import CheckpointError, Problem

#: A message shows this many characters of a name; real tensor names stay under 120.
SHOWN_LIMIT = 160

#: A real index or configuration nests a few hundred objects and lists (``tokenizer_config.json`` with 100,000 added
#: tokens is the largest); each costs about 60 bytes of Python however short its text, so the text's size alone does
#: not bound memory.
MAX_CONTAINERS = 300_000

#: The same for keys, counted by their colons; DeepSeek-V3's index has 92,000.
MAX_KEYS = 500_000

#: Larger text must be ASCII, as every published header and index is: one character beyond it makes Python keep all of
#: them in four bytes each.
MAX_WIDE_BYTES = 16_000_000

#: Opening text of a Git LFS pointer, which is what a clone without ``git lfs pull`` leaves in place of the weights.
LFS_PREFIX = b"version https://git-lfs"


def shown(text: str) -> str:
    """``text`` with control characters, bidirectional marks and lone surrogates escaped, and cut to a limit."""
    cut = text if len(text) <= SHOWN_LIMIT else text[:SHOWN_LIMIT] + "..."
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in cut)


def finding(
    fault: CheckpointFault,
    what: str,
    file: str | None = None,
    tensor: str | None = None,
    expected: str | None = None,
    actual: str | None = None,
    fix: str | None = None,
) -> Problem:
    """A Problem whose names, which come from the checkpoint, are escaped for a terminal.  The caller escapes ``actual``.

    It takes more than six parameters because they are the fields of a :class:`Problem`.
    """
    where = None if file is None else shown(file)
    return Problem(fault, what, file=where, tensor=None if tensor is None else shown(tensor), expected=expected, actual=actual, fix=fix)


def file_kind(mode: int) -> str:
    """The kind of file of an ``st_mode``, in words."""
    tests = (
        (stat.S_ISREG, "a file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((words for test, words in tests if test(mode)), "something else")


def os_problem(error: OSError, path: Path, file: str) -> Problem:
    """The problem for an OSError on ``path``."""
    if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
        target = shown(os.readlink(path))
        return finding(
            CheckpointFault.DANGLING_LINK,
            f"the link leads to {target}, which cannot be reached",
            file=file,
            expected="a file behind the link",
            actual="a loop of links" if error.errno == errno.ELOOP else "nothing",
            fix="download the file again",
        )
    return finding(CheckpointFault.UNREADABLE, error.strerror or type(error).__name__, file=file, fix="check the path and its permissions")


@contextmanager
def open_regular(path: Path, file: str) -> Iterator[tuple[int, int]]:
    """A descriptor of the regular file at ``path`` and its size in bytes; ``file`` is its name in messages.

    Follows links, which the Hugging Face cache uses.  Raises CheckpointError for other kinds of files without opening them:
    opening a pipe would wait for a writer, and opening a device may act on it.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            # O_NONBLOCK: the file may have been replaced by a pipe since.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(os_problem(error, path, file)) from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            finding(CheckpointFault.NOT_A_FILE, "not a file", file=file, expected="a regular file", actual=file_kind(mode))
        )
    try:
        yield fd, os.fstat(fd).st_size
    finally:
        os.close(fd)


def read_exactly(fd: int, count: int, offset: int) -> bytes:
    """``count`` bytes at ``offset``, fewer only at the end of the file.  Raises the operating system's OSError."""
    data = os.pread(fd, count, offset)
    if len(data) == count:
        return data
    parts = [data]
    while data and (left := count - sum(map(len, parts))):
        data = os.pread(fd, left, offset + count - left)
        parts.append(data)
    return b"".join(parts)


def read_json(path: Path, file: str, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a small file.

    Raises CheckpointError when the file is absent, not regular, or too large: than ``max_bytes``, or than
    :data:`MAX_WIDE_BYTES` if not ASCII.  Also when it is not UTF-8, not JSON, not an object, or nested too deeply; when it
    has a key twice; and for NaN and Infinity, which JSON does not have.
    """
    with open_regular(path, file) as (fd, size):
        if size > max_bytes:
            raise CheckpointError(_json_problem(file, "the file is too large", f"at most {max_bytes} bytes", f"{size} bytes"))
        try:
            raw = read_exactly(fd, size, 0)
        except OSError as error:
            raise CheckpointError(os_problem(error, path, file)) from error
    if raw.startswith(LFS_PREFIX):
        raise CheckpointError(lfs_problem(file))
    return parse_object(raw, file)


def parse_object(raw: bytes, file: str) -> dict[str, Any]:
    """The JSON object that ``raw`` spells; CheckpointError as for :func:`read_json`."""
    containers, keys = raw.count(b"[") + raw.count(b"{"), raw.count(b":")
    if containers > MAX_CONTAINERS:
        raise CheckpointError(_json_problem(file, "too many nested values", f"at most {MAX_CONTAINERS}", f"{containers}"))
    if keys > MAX_KEYS:
        raise CheckpointError(_json_problem(file, "too many keys", f"at most {MAX_KEYS}", f"about {keys}"))
    if len(raw) > MAX_WIDE_BYTES and not raw.isascii():
        raise CheckpointError(
            _json_problem(file, "too large for text beyond ASCII", f"at most {MAX_WIDE_BYTES} bytes", f"{len(raw)} bytes")
        )
    try:
        data = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise CheckpointError(_json_problem(file, "not UTF-8 text", "UTF-8", f"byte {raw[error.start]:#04x} at {error.start}")) from error
    except RecursionError as error:
        raise CheckpointError(_json_problem(file, "nested too deeply", "a flat object", "hundreds of levels")) from error
    except _DuplicateKeyError as error:
        fault = CheckpointFault.DUPLICATE_KEY
        raise CheckpointError(finding(fault, f"the key {shown(error.key)} stands twice", file=file, tensor=error.key)) from error
    except ValueError as error:  # JSONDecodeError, NaN, and integers of more digits than Python converts
        raise CheckpointError(_json_problem(file, "not JSON", "a JSON object", shown(str(error)))) from error
    if not isinstance(data, dict):
        raise CheckpointError(_json_problem(file, "not a JSON object", "an object", type(data).__name__))
    return data


def lfs_problem(file: str) -> Problem:
    """The problem of a Git LFS pointer in place of a file."""
    return finding(
        CheckpointFault.GIT_LFS_POINTER,
        "a Git LFS pointer in place of the file",
        file=file,
        expected="the file itself",
        actual="a pointer of a few lines",
        fix="run `git lfs pull` in the checkpoint's repository",
    )


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        raise _DuplicateKeyError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return result


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _json_problem(file: str, what: str, expected: str, actual: str) -> Problem:
    return finding(CheckpointFault.BAD_JSON, what, file=file, expected=expected, actual=actual, fix="download the file again")
