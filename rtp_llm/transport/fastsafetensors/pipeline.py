"""Reads chunks instead of files, by the parts of fastsafetensors' AutoLoader.

Imported only once the probe has found these parts.  To the package each chunk is a small file, whose header ends where the
chunk begins.  So all its copiers (buffered, direct, GPUDirect, 3FS) read chunks as they read files, and stacked tensors may be
divided.  All entries are plain bytes, so the package needs to know no dtype.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch
from fastsafetensors import SafeTensorsMetadata, cpp
from fastsafetensors.frameworks import get_framework_op
from fastsafetensors.loader import BaseSafeTensorsFileLoader
from fastsafetensors.parallel_loader import PipelineParallel

from rtp_llm.transport.fastsafetensors.config import ReaderContext
from rtp_llm.transport.fastsafetensors.failure import FailureDiagnoser
from rtp_llm.transport.fastsafetensors.sequence import Chunk, Message

_log = logging.getLogger("rtp_llm.transport")

_FRAMEWORK = "pytorch"
#: Loaders of the package whose copier is named like them.
_OWN_COPIERS = frozenset({"3fs"})


class ChunkLoader(BaseSafeTensorsFileLoader):  # type: ignore[misc]  # the package ships no types
    """Takes chunks, by key, where its base takes files."""

    #: Of the base: what makes the object that reads one file.
    copier_constructor: Callable[..., Any]

    def __init__(self, context: ReaderContext, chunks: Mapping[str, Chunk], diagnoser: FailureDiagnoser) -> None:
        self._directory, self._chunks, self._diagnoser = context.directory, chunks, diagnoser
        config = context.config
        cpp.set_debug_log(config.debug_log)
        framework = get_framework_op(_FRAMEWORK)
        copier = config.loader if config.loader in _OWN_COPIERS else config.copier
        options = {"max_threads": context.threads, **dict(config.copier_options)}
        super().__init__(
            pg=None,
            device=framework.get_device(str(context.device), None),
            copier_type=copier,
            set_numa=config.set_numa,
            framework=_FRAMEWORK,
            **options,
        )
        if copier == "nogds":
            direct = {self._path(file): choice for file, choice in context.direct.items()}
            self.copier_constructor = _choosing(self.copier_constructor, direct)

    def _path(self, file: str) -> str:
        return os.path.join(self._directory, file)

    def add_filenames(self, filenames: Mapping[int, Sequence[str]]) -> None:
        """Registers chunks, by their keys, for the next ``copy_files_to_device``."""
        for rank, keys in filenames.items():
            for key in keys:
                chunk = self._chunks[key]
                self._diagnoser.about(chunk)
                metadata = SafeTensorsMetadata(
                    string=header(chunk),
                    header_length=chunk.start,
                    size_bytes=chunk.stop,
                    framework=self.framework,
                    src=self._path(chunk.file),
                )
                self.meta[key] = (metadata, rank)
                self.frames.update(metadata.tensors)


def header(chunk: Chunk) -> str:
    """A chunk as the header of a safetensors file: an entry of bytes for each message, and for each gap."""
    entries: dict[str, object] = {}
    at = chunk.start
    for number, message in enumerate(chunk.messages):
        if message.start > at:
            entries[f"gap {number}"] = _entry(at - chunk.start, message.start - chunk.start)
        entries[str(number)] = _entry(message.start - chunk.start, message.stop - chunk.start)
        at = message.stop
    return json.dumps(entries)


def _entry(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


def _choosing(construct: Callable[..., Any], direct: Mapping[str, bool]) -> Callable[..., Any]:
    """``construct`` for copiers that read a file around the page cache, or through it, as ``direct`` says for its path.

    Without an entry the package decides, by the file system and an environment variable.  It checks the descriptor's flag at
    every read.
    """

    def make(metadata: Any, *rest: Any) -> Any:
        copier = construct(metadata, *rest)
        descriptor = getattr(copier, "fd", -1)
        wanted = direct.get(metadata.src)
        if wanted is not None and isinstance(descriptor, int) and descriptor >= 0:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            # A file system that refuses direct reads (tmpfs) was opened without O_DIRECT, and stays so.
            if not wanted and flags & os.O_DIRECT:
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return copier

    return make


class Pipeline(PipelineParallel):  # type: ignore[misc]  # the package ships no types
    """The package's pipeline, with its messages in the log: it prints to stdout, which carries JSON."""

    def _log_message(self, message: str, is_error: bool = False) -> None:
        _log.debug("fastsafetensors: %s", message)


class ChunkReader:
    """Reads chunks in order, some ahead, and returns their messages as ``uint8`` tensors on the device.

    A tensor, and work queued on it, must be finished before the next call of :meth:`next`.
    """

    def __init__(self, context: ReaderContext, chunks: Sequence[Chunk], diagnoser: FailureDiagnoser, *, overlap: bool) -> None:
        self._diagnoser = diagnoser
        self._expected: Iterator[Message] = (message for chunk in chunks for message in chunk.messages)
        keyed = {str(number): chunk for number, chunk in enumerate(chunks)}
        self._loader = ChunkLoader(context, keyed, diagnoser)
        self._pipeline = Pipeline(
            pg=None,
            loader=self._loader,
            hf_weights_files=list(keyed),
            queue_size=context.config.queue_size,
            use_tqdm_on_load=False,
            accumulate_resident=False,
            borrowed_tensors=True,
            overlap_io=overlap,
        )
        self._weights: Generator[tuple[str, Any], None, None] = self._pipeline.iterate_weights()

    def next(self) -> tuple[Message, torch.Tensor] | None:
        """The next message; None after the last."""
        with self._diagnoser.watching():
            while (item := next(self._weights, None)) is not None and item[0].startswith("gap"):
                del item
            message = next(self._expected, None)
            if (item is None) != (message is None):
                raise RuntimeError("it delivered more or less than was requested")
            if item is None or message is None:
                return None
            flat = item[1].reshape(-1).view(torch.uint8)
            if flat.numel() != message.nbytes:
                raise RuntimeError(f"it delivered {flat.numel()} bytes where {message.nbytes} were requested")
            return message, flat

    def close(self) -> None:
        """Ends its threads and frees its buffers; safe after a failure."""
        with contextlib.closing(self._pipeline), contextlib.closing(self._weights):
            pass
