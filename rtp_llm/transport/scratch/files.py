"""Open files of a checkpoint, read by position.

``pread``, not loads from a map: truncating a mapped file kills the process (SIGBUS), and page faults over a network file system
are an order of magnitude slower than reads.  For cached rows of a matrix the kernel copies from a map (:mod:`.gather`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rtp_llm.checkpoint.catalog import FileInfo, TensorInfo
from rtp_llm.errors import Problem, TransportError
from rtp_llm.transport.faults import TransportFault
from rtp_llm.transport.scratch.gather import Mapped

#: Gaps below a quarter of a run are read over: page faults would cost more.
_WORTH = 4


class Files:
    """The catalogue's files of one directory for one thread, which reads them in order: the file read last stays open.

    So a load holds one descriptor a thread, or two where rows are gathered (a map has its own), whatever the number of files.
    """

    def __init__(self, directory: str, files: Sequence[FileInfo]) -> None:
        self._directory = Path(directory)
        self._files: Mapping[str, FileInfo] = {f.name: f for f in files}
        self._name: str | None = None
        self._descriptor = -1
        self._mapped: Mapped | None = None

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def scatter(self, tensor: TensorInfo, start: int, buffers: list[memoryview], goal: int) -> None:
        """Fills ``buffers``, at most 1,024 and ``goal`` bytes together, one after another with the bytes of ``tensor``'s file
        from offset ``start``.

        Errors name ``tensor``, the first whose bytes are read.

        Raises:
            TransportError: naming file and tensor, where the file ends early, has changed, or the system reports an
                error.
        """
        try:
            if tensor.file != self._name:
                self._open(tensor.file)
            descriptor = self._descriptor
            got = os.preadv(descriptor, buffers, start)
            while got < goal:
                # The kernel cuts a call short at 2 GiB, at a signal, or at the end of the file.
                more = os.preadv(descriptor, _behind(buffers, got), start + got)
                if more == 0:
                    raise TransportError(_short(tensor, start + goal, start + got))
                got += more
        except OSError as error:
            raise TransportError(_refused(tensor, goal, error)) from error

    def gather(self, tensor: TensorInfo, start: int, stride: int, length: int, into: memoryview) -> bool:
        """Fills ``into`` with runs of ``length`` bytes, ``stride`` apart, from offset ``start`` of ``tensor``'s file, without reading
        the gaps (:meth:`.Mapped.gather`); returns False where that is not possible.

        Raises:
            TransportError: the file has changed, or the system reports an error.
        """
        if (stride - length) * _WORTH < length:
            return False
        try:
            if tensor.file != self._name:
                self._open(tensor.file)
            if self._mapped is None:
                self._mapped = Mapped(self._descriptor, self._files[tensor.file].size)
            return self._mapped.gather(start, stride, length, into)
        except OSError as error:
            raise TransportError(_refused(tensor, len(into), error)) from error

    def read(self, tensor: TensorInfo, into: memoryview) -> None:
        """Fills ``into`` with all of a tensor's bytes."""
        self.scatter(tensor, tensor.start, [into], tensor.nbytes)

    def _open(self, name: str) -> None:
        self._close()
        self._descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        self._name = name
        size = os.fstat(self._descriptor).st_size
        if size != self._files[name].size:
            raise TransportError(
                Problem(
                    TransportFault.FILE_CHANGED,
                    "its size has changed since its header was read",
                    file=name,
                    expected=f"{self._files[name].size} bytes",
                    actual=f"{size} bytes",
                    fix="wait until the download or copy has finished, and load again",
                )
            )

    def _close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        if self._name is not None:
            os.close(self._descriptor)
            self._name = None


def _behind(buffers: Sequence[memoryview], done: int) -> list[memoryview]:
    """The rest of ``buffers`` after their first ``done`` bytes."""
    left = []
    for buffer in buffers:
        if done < len(buffer):
            left.append(buffer[done:])
        done = max(0, done - len(buffer))
    return left


def _refused(tensor: TensorInfo, nbytes: int, error: OSError) -> Problem:
    return Problem(
        TransportFault.IO_ERROR,
        f"could not be read: {error.strerror}",
        file=tensor.file,
        tensor=tensor.name,
        expected=f"{nbytes} bytes",
        actual=f"errno {error.errno}",
        fix="check the disk or the network file system, then load again",
    )


def _short(tensor: TensorInfo, expected: int, actual: int) -> Problem:
    return Problem(
        TransportFault.SHORT_READ,
        "the file was cut while it was read",
        file=tensor.file,
        tensor=tensor.name,
        expected=f"{expected} bytes",
        actual=f"{actual} bytes",
        fix="download the file again",
    )
