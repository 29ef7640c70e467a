"""Tells a bad file from a package that does not work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from rtp_llm.checkpoint.catalog import FileInfo
from rtp_llm.errors import Problem, RtpLlmError, TransportError
from rtp_llm.transport.fastsafetensors.sequence import Chunk
from rtp_llm.transport.faults import TransportFault

#: Bytes read at a time when a chunk is read again.
_LOOK_BYTES = 8 << 20


class FastsafetensorsFailure(Exception):
    """The package failed and the files are sound: another transport takes over.  Never leaves the loader."""


class FailureDiagnoser:
    """After a failure reads the same chunk again, to find whether the file or the package is at fault.

    The package raises plain ``Exception`` for everything, with texts that change.
    """

    def __init__(self, directory: str, files: tuple[FileInfo, ...]) -> None:
        self._directory = Path(directory)
        self._files: Mapping[str, FileInfo] = {f.name: f for f in files}
        self.chunk: Chunk | None = None

    def about(self, chunk: Chunk) -> None:
        """Notes the chunk that is read next, and checks its file.

        Raises:
            TransportError: naming the file, if it is missing or its size has changed.
        """
        self.chunk = chunk
        expected = self._files[chunk.file].size
        try:
            actual = (self._directory / chunk.file).stat().st_size
        except OSError as error:
            raise TransportError(_unreadable(chunk, error)) from error
        if actual != expected:
            raise TransportError(
                Problem(
                    TransportFault.FILE_CHANGED,
                    "its size has changed since its header was read",
                    file=chunk.file,
                    expected=f"{expected} bytes",
                    actual=f"{actual} bytes",
                    fix="wait until the download or copy has finished, and load again",
                )
            )

    def look_again(self) -> None:
        """Raises ``TransportError`` if the last chunk cannot be read."""
        if self.chunk is None:
            return
        self.about(self.chunk)
        try:
            with open(self._directory / self.chunk.file, "rb", buffering=0) as file:
                file.seek(self.chunk.start)
                left = self.chunk.nbytes
                while left:
                    got = len(file.read(min(left, _LOOK_BYTES)))
                    if not got:
                        raise TransportError(_cut(self.chunk, self.chunk.stop - left))
                    left -= got
        except OSError as error:
            raise TransportError(_unreadable(self.chunk, error)) from error

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around calls of the package: turns its errors into a data error, or a failure of the package.

        Raises:
            TransportError: the file is at fault.
            FastsafetensorsFailure: the package is.  Without the package's error, whose traceback keeps tensors alive.
        """
        text = ""
        try:
            yield
        except (RtpLlmError, torch.OutOfMemoryError) as error:
            if isinstance(error, RtpLlmError):
                raise
            text = "out of device memory"
        except Exception as error:  # noqa: BLE001  # the package raises bare Exception for everything
            cause: BaseException | None = error
            while cause is not None:  # an error of ours, raised through the package's thread
                if isinstance(cause, RtpLlmError):
                    raise cause.with_traceback(None) from None
                cause = cause.__cause__
            first = next(iter(str(error).splitlines()), "")
            text = f"{type(error).__name__}: {first}"
        if text:
            self.look_again()
            raise FastsafetensorsFailure(text)


def _unreadable(chunk: Chunk, error: OSError) -> Problem:
    return Problem(
        TransportFault.IO_ERROR,
        f"could not be read: {error.strerror}",
        file=chunk.file,
        tensor=chunk.messages[0].pieces[0].tensor.name,
        expected=f"bytes {chunk.start} to {chunk.stop}",
        actual=f"errno {error.errno}",
        fix="check the disk or the network file system, then load again",
    )


def _cut(chunk: Chunk, end: int) -> Problem:
    pieces = [piece for message in chunk.messages for piece in message.pieces]
    hit = next((piece for piece in pieces if piece.stop > end), pieces[-1])
    return Problem(
        TransportFault.SHORT_READ,
        "the file was cut while it was read",
        file=chunk.file,
        tensor=hit.tensor.name,
        expected=f"{hit.stop} bytes",
        actual=f"{end} bytes",
        fix="download the file again",
    )
