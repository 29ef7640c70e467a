"""Which files of a directory are the checkpoint.

In this order: the files of an index, a single ``model.safetensors``, a complete set of shards; safetensors before ``.bin``.
Other files are reported and never read, since matching by substring would read weights twice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import finding, os_problem, shown
from rtp_llm.errors import CheckpointError, Problem


@dataclass(frozen=True, slots=True)
class _Format:
    """One file format: its name in the catalogue, suffixes, usual single file and usual index."""

    name: str
    suffixes: tuple[str, ...]
    single: str
    index: str


#: In order of preference: a safetensors header can be checked, a pickle has to be interpreted.
_FORMATS = (
    _Format("safetensors", (".safetensors",), "model.safetensors", "model.safetensors.index.json"),
    _Format("torch", (".bin", ".pt", ".pth"), "pytorch_model.bin", "pytorch_model.bin.index.json"),
)

#: ``model-00001-of-00030.safetensors``: stem, number, count.
_SHARD = re.compile(r"(?P<stem>.+?)[-_.](?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.[a-z]+", re.ASCII)

#: Files that transformers' Trainer, Accelerate and DeepSpeed write beside weights; none are weights.
_TRAINING = re.compile(
    r"(optimizer|scheduler|scaler|sampler|training_args|trainer_state|rng_state|random_states|zero_pp_rank|mp_rank|custom_checkpoint)\w*\."
)

#: Mistral's and Meta's own layouts (other tensor names) beside the Hugging Face files, and LoRA adapters.
_OTHER = (
    ("consolidated", "the vendor's own layout"),
    ("adapter_model", "a LoRA adapter"),
)

#: Weights in formats of other programs, for a message that helps.
_FOREIGN = {
    ".gguf": "GGUF (transformers' from_pretrained(gguf_file=...) and save_pretrained turn it into safetensors)",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".onnx": "ONNX",
}


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoint's files: their ``format``, and the index's name if one decides, else ``files``, sorted."""

    format: str
    index: str | None = None
    files: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()


def list_directory(directory: Path) -> list[str]:
    """Names in ``directory``, sorted; CheckpointError if it cannot be listed."""
    try:
        return sorted(os.listdir(directory))
    except NotADirectoryError as error:
        fix = "give the directory that holds config.json and the weights"
        problem = finding(
            CheckpointFault.NOT_A_DIRECTORY, "not a directory", file=str(directory), expected="a directory", actual="a file", fix=fix
        )
        raise CheckpointError(problem) from error
    except FileNotFoundError as error:
        if directory.is_symlink():
            raise CheckpointError(os_problem(error, directory, str(directory))) from error
        fix = "check the path; names of the Hugging Face hub are not downloaded"
        problem = finding(CheckpointFault.NO_DIRECTORY, "no such directory", file=str(directory), fix=fix)
        raise CheckpointError(problem) from error
    except OSError as error:
        raise CheckpointError(os_problem(error, directory, str(directory))) from error
    except ValueError as error:  # a NUL byte in the path
        problem = finding(CheckpointFault.NO_DIRECTORY, f"not a path: {error}", file=str(directory))
        raise CheckpointError(problem) from error


def discover(names: Iterable[str]) -> Selection:
    """Choose among the file names of a directory; CheckpointError (NO_WEIGHTS, AMBIGUOUS_FILES) where none can be."""
    names = sorted(names)
    for fmt in _FORMATS:
        indexes = [n for n in names if n.endswith(tuple(f"{s}.index.json" for s in fmt.suffixes)) and _other(n) is None]
        weights = [n for n in names if n.endswith(fmt.suffixes) and not _TRAINING.match(n)]
        own = [n for n in weights if _other(n) is None]
        if indexes or own:
            chosen = _by_index(fmt, indexes) if indexes else _by_names(fmt, own)
            return _with_strays(chosen, fmt, names)
    raise CheckpointError(_no_weights(names))


def _by_index(fmt: _Format, indexes: list[str]) -> Selection:
    if fmt.index in indexes:
        return Selection(fmt.name, index=fmt.index)
    if len(indexes) == 1:
        return Selection(fmt.name, index=indexes[0])
    raise CheckpointError(_ambiguous("several indexes", fmt.index, indexes))


def _by_names(fmt: _Format, own: list[str]) -> Selection:
    shards: dict[tuple[str, int], dict[int, str]] = {}
    single: list[str] = []
    for name in own:
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match["stem"], int(match["count"])), {})[int(match["number"])] = name
        else:
            single.append(name)
    if shards and fmt.single in single:
        raise CheckpointError(_ambiguous("one whole file beside shards, and no index to tell which counts", fmt.index, [fmt.single, *own]))
    if len(shards) > 1:
        raise CheckpointError(_ambiguous("shards of several sets, and no index", fmt.index, own))
    for (_, count), found in shards.items():
        note = finding(
            CheckpointFault.NO_INDEX, "shards without an index", expected=fmt.index, actual=f"{len(found)} files named as shards"
        )
        return Selection(fmt.name, files=tuple(sorted(found.values())), problems=_absent(found, count), notes=(note,))
    if fmt.single in single:
        return Selection(fmt.name, files=(fmt.single,))
    if len(single) > 1 and fmt.name == "torch":
        # Several pickles in one directory are as often checkpoints of a training run as one model.
        raise CheckpointError(_ambiguous("several torch files, and no index", fmt.index, single))
    note = finding(
        CheckpointFault.NO_INDEX,
        "files without an index",
        expected=f"{fmt.single} or {fmt.index}",
        actual=", ".join(map(shown, single[:5])),
    )
    return Selection(fmt.name, files=tuple(single), notes=(note,))


def _absent(found: dict[int, str], count: int) -> tuple[Problem, ...]:
    """The problem of shards that are absent, by the numbers in the names of others."""
    # A name may claim a million shards; a thousand missing ones are enough.
    missing = [n for n in range(1, min(count, len(found) + 1000) + 1) if n not in found]
    if not missing and count == len(found):
        return ()
    number, example = next(iter(found.items()))
    match = _SHARD.fullmatch(example)
    assert match
    width = match.end("number") - match.start("number")
    absent = [f"{example[: match.start('number')]}{n:0{width}d}{example[match.end('number') :]}" for n in missing[:10]] or [example]
    what = f"absent: {', '.join(map(shown, absent))}{', ...' if len(missing) > 10 else ''}" if missing else f"shard {number} of {count}"
    fix = "download the checkpoint again, with its index"
    problem = finding(
        CheckpointFault.SHARD_ABSENT, what, file=absent[0], expected=f"{count} shards", actual=f"{len(found)} shards", fix=fix
    )
    return (problem,)


def _with_strays(chosen: Selection, fmt: _Format, names: list[str]) -> Selection:
    """Adds notes on weights outside of the selection; the catalogue checks those that an index may name."""
    notes = list(chosen.notes)
    taken = frozenset(chosen.files)
    every_suffix = tuple(s for f in _FORMATS for s in f.suffixes)
    for name in names:
        if not name.endswith(every_suffix) or name in taken or _TRAINING.match(name):
            continue
        if chosen.index and name.endswith(fmt.suffixes):
            continue
        notes.append(stray_note(name, chosen))
    return Selection(chosen.format, chosen.index, chosen.files, chosen.problems, tuple(notes))


def stray_note(name: str, chosen: Selection) -> Problem:
    """The note on a file of weights that is not part of the checkpoint."""
    decides = chosen.index or (chosen.files[0] if chosen.files else "")
    kind = _other(name)
    what = f"ignored: {kind}" if kind else "ignored: not part of the checkpoint"
    return finding(CheckpointFault.STRAY_FILE, what, file=name, expected=f"what {shown(decides)} names", actual="a file beside it")


def weight_files(names: Iterable[str], chosen: Selection) -> list[str]:
    """Names in the directory that have a suffix of the chosen format and are not left by training."""
    suffixes = next(f.suffixes for f in _FORMATS if f.name == chosen.format)
    return [n for n in names if n.endswith(suffixes) and not _TRAINING.match(n)]


def _other(name: str) -> str | None:
    return next((kind for prefix, kind in _OTHER if name.startswith(prefix)), None)


def _ambiguous(what: str, index: str, files: list[str]) -> Problem:
    listed = ", ".join(shown(f) for f in files[:6]) + (", ..." if len(files) > 6 else "")
    fix = f"keep one set of files, or add {index}"
    return finding(CheckpointFault.AMBIGUOUS_FILES, what, file=files[0], expected="one set of weights", actual=listed, fix=fix)


def _no_weights(names: list[str]) -> Problem:
    kinds = sorted({kind for n in names if (kind := _other(n)) and n.endswith(tuple(s for f in _FORMATS for s in f.suffixes))})
    foreign = sorted({words for n in names for suffix, words in _FOREIGN.items() if n.endswith(suffix)})
    actual = "; ".join(kinds + foreign) or (f"{len(names)} other files" if names else "an empty directory")
    fix = "give the directory that holds the weights"
    if "snapshots" in names:
        fix = "this is the root of a Hugging Face cache entry: give snapshots/<revision> inside it"
    return finding(
        CheckpointFault.NO_WEIGHTS, "no weights", expected="*.safetensors, pytorch_model*.bin, or an index of them", actual=actual, fix=fix
    )
