"""Writes the files of a Hugging Face checkpoint: safetensors headers, the index, and the companions of the weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import Catalog, FileInfo, TensorInfo, bits_of
from rtp_llm.config.faults import ConfigFault
from rtp_llm.errors import ConfigError, Problem

_INDEX = "model.safetensors.index.json"
#: The temporary directory inside an existing target.
_PARTIAL = ".partial"
#: A model's files beside its weights: configuration, tokeniser, templates, pooling, cards and licences.  Code (``.py``) is
#: deliberately not copied.
_COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "*_Pooling/config.json")


def check_room(out: Path, source: str, nbytes: int) -> None:
    """Raises ``ConfigError`` where ``out`` holds something already, is the source, or its disk has no ``nbytes`` left."""
    taken = out.exists() and (not out.is_dir() or any(path.name != _PARTIAL for path in out.iterdir()))
    if taken or out.resolve() == Path(source).resolve():
        raise ConfigError(
            Problem(
                ConfigFault.BAD_VALUE,
                f"{out} cannot be written to",
                expected="a directory that is empty or does not exist",
                actual="something that is there already",
                fix="choose another name",
            )
        )
    parent = next(p for p in out.absolute().parents if p.exists())
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise ConfigError(
            Problem(ConfigFault.BAD_VALUE, f"{out} has too little space", expected=f"{nbytes} bytes", actual=f"{free} bytes free")
        )


@contextmanager
def completed(out: Path) -> Iterator[Path]:
    """A temporary directory whose content is moved to ``out`` at the end; removed if anything fails.

    It lies beside ``out`` and is renamed; or inside, where ``out`` exists: that may be a mount point, or the only directory that
    this user may write to.
    """
    out = Path(os.path.abspath(out))  # "." has no name
    inside = out.is_dir()
    partial = out / _PARTIAL if inside else out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if inside:
            # config.json last: without it the directory is no checkpoint.
            for path in sorted(partial.iterdir(), key=lambda path: (path.name == "config.json", path.name)):
                path.rename(out / path.name)
        else:
            partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def renamed(files: Iterable[FileInfo]) -> dict[str, str]:
    """The names of weight files in the export: the same, or the safetensors counterparts of torch files.

    ``a.bin`` and ``a.pt`` have the same counterpart; the second one by name is numbered: ``a-2.safetensors``.
    """
    names: dict[str, str] = {}
    taken: set[str] = set()
    # Files that keep their names come first.
    for file in sorted(files, key=lambda file: (file.format != "safetensors", file.name)):
        names[file.name] = next(name for name in _candidates(file) if name not in taken)
        taken.add(names[file.name])
    return names


def _candidates(file: FileInfo) -> Iterator[str]:
    if file.format == "safetensors":
        yield file.name
        return
    stem = file.name.rpartition(".")[0].replace("pytorch_model", "model", 1)
    yield f"{stem}.safetensors"
    yield from (f"{stem}-{number}.safetensors" for number in count(2))


def header_bytes(tensors: Sequence[TensorInfo], file: FileInfo) -> bytes:
    """The header of a safetensors file that holds ``tensors`` end to end, as safetensors' own writer spells it: 8 bytes
    of length, then compact JSON, padded with spaces to 8 bytes."""
    header: dict[str, Any] = {}
    metadata = dict(file.metadata) if file.format == "safetensors" else {"format": "pt"}
    if metadata:
        header["__metadata__"] = metadata
    at = 0
    for tensor in tensors:
        size = tensor.nbytes if tensor.strides is None else _dense_bytes(tensor)
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_index(out: Path, catalog: Catalog, weight_map: Mapping[str, str]) -> None:
    """Writes the index: the source's where it is still right, else a new one.  ``model.safetensors`` alone needs none; a single
    file of another name does."""
    if set(weight_map.values()) == {"model.safetensors"}:
        return
    source = Path(catalog.directory) / _INDEX
    if source.exists() and all(f.format == "safetensors" for f in catalog.files):
        shutil.copyfile(source, out / _INDEX)
        return
    total = sum(t.nbytes for t in catalog.tensors)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_companions(catalog: Catalog, out: Path) -> None:
    """Copies configuration, tokeniser and the like; not indexes."""
    source = Path(catalog.directory)
    for pattern in _COMPANIONS:
        for path in sorted(source.glob(pattern)):
            target = out / path.relative_to(source)
            if path.is_file() and not path.name.endswith(".index.json") and _belongs(path, source):
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def _belongs(path: Path, source: Path) -> bool:
    """Whether a file is the checkpoint's own: in its directory, or linked to the same repository of the hub's cache
    (``snapshots/<commit>/name`` to ``blobs/<hash>``).  Another link could put a private file into a published export."""
    real, home = path.resolve(), source.resolve()
    return real.is_relative_to(home) or (home.parent.name == "snapshots" and real.is_relative_to(home.parent.parent / "blobs"))


def _dense_bytes(tensor: TensorInfo) -> int:
    return prod(tensor.shape) * bits_of(tensor.dtype) // 8
