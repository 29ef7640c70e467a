"""What a checkpoint directory holds, from headers only: frozen, sorted, the same on every machine."""

from __future__ import annotations

from dataclasses import dataclass

from rtp_llm.errors import Problem


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as it stands in a file.

    ``dtype`` is safetensors' name (``BF16``, ``F8_E4M3``, ...); its bytes lie at ``file[start:stop]``, counted from
    the beginning of the file.  ``strides`` (in elements) is None for the usual row-major layout; only ``.bin`` files
    hold others, and then ``start:stop`` spans everything that the strides reach.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    stop: int
    strides: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in the file from ``start`` to ``stop``."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of weights: its name inside the directory, format (``safetensors`` | ``torch``), size in bytes, and
    the header's ``__metadata__`` (sorted pairs; empty for torch files)."""

    name: str
    format: str
    size: int
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that a checkpoint's headers say.

    ``tensors`` are those that may be loaded, sorted by name: where an index exists, exactly those it names.
    ``problems`` forbid loading; ``notes`` do not (tensors outside the index, stray files), and are reported.
    """

    directory: str
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]
