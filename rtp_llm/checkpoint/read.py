"""``read_catalog``: from a directory to a :class:`Catalog`, reading nothing but headers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rtp_llm.checkpoint.catalog import Catalog, TensorInfo
from rtp_llm.checkpoint.discover import Selection, discover, list_directory, stray_note, weight_files
from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import finding, shown
from rtp_llm.checkpoint.header import MAX_PROBLEMS, Header, read_header
from rtp_llm.checkpoint.index import read_index
from rtp_llm.collector import collector_paused
from rtp_llm.errors import CheckpointError, Problem

#: Five times DeepSeek-V3; at about 400 bytes each this bounds memory near 200 MB.
MAX_ALL_TENSORS = 500_000


@collector_paused()
def read_catalog(directory: str | Path) -> Catalog:
    """What the checkpoint in ``directory`` holds.

    Never raises for bad content: problems are in ``Catalog.problems``, and ``Catalog.raise_for_problems()`` raises them.
    Reads headers and the index only; torch is imported only for torch files.
    """
    root = Path(directory)
    try:
        names = list_directory(root)
        chosen = discover(names)
        builder = _Builder(root, chosen)
        if chosen.index is None:
            builder.add_files()
        else:
            builder.add_indexed(read_index(root / chosen.index, chosen.index), names)
    except CheckpointError as error:
        return Catalog(str(directory), (), (), error.problems, ())
    return builder.catalog(str(directory))


class _Builder:
    """Collects tensors, problems and notes of one selection of files."""

    def __init__(self, root: Path, chosen: Selection) -> None:
        self._root, self._chosen = root, chosen
        self._headers: dict[str, Header] = {}
        self._places: dict[str, str] | None = None
        self._tensors: list[TensorInfo] = []
        self._problems = list(chosen.problems)
        self._notes = list(chosen.notes)

    def add_files(self) -> None:
        """Adds all tensors of all selected files; a name may be in one file only."""
        self._read(self._chosen.files)
        owners: dict[str, str] = {}
        for file, header in self._headers.items():
            for tensor in header.tensors:
                owner = owners.setdefault(tensor.name, file)
                # A name twice in one file is a finding of the header.
                if owner == file:
                    self._tensors.append(tensor)
                elif not self._enough():
                    self._problems.append(_duplicate(tensor, owner))

    def add_indexed(self, weight_map: dict[str, str], names: list[str]) -> None:
        """Adds exactly the tensors in ``weight_map``, each from the file that it names."""
        wanted: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            wanted.setdefault(file, []).append(name)
        present = set(names)
        self._read(sorted(wanted.keys() & present))
        absent = sorted(wanted.keys() - present)
        found = len(wanted) - len(absent)
        self._problems += [_shard_absent(f, sorted(wanted[f]), len(wanted), found) for f in absent[:MAX_PROBLEMS]]
        self._more(len(absent), "files", self._chosen.index)
        for file, header in self._headers.items():
            self._take_named(file, header, wanted[file], weight_map)
        self._notes += [stray_note(name, self._chosen) for name in weight_files(names, self._chosen) if name not in wanted]

    def _take_named(self, file: str, header: Header, named: list[str], weight_map: dict[str, str]) -> None:
        held = {tensor.name: tensor for tensor in header.tensors}
        self._tensors += [held[name] for name in named if name in held]
        absent = sorted(name for name in named if name not in held)
        if header.complete and absent:
            # Finding it in another file tells a stale index from a lost shard.
            if self._places is None:
                self._places = {t.name: other for other, h in self._headers.items() for t in h.tensors if t.name in weight_map}
            if not self._enough():
                self._problems += [_tensor_absent(name, file, self._places.get(name)) for name in absent[:MAX_PROBLEMS]]
                self._more(len(absent), "tensors", file)
        extra = sorted(name for name in held if weight_map.get(name) != file)
        if extra:
            self._notes.append(_outside(file, extra, weight_map))

    def _enough(self) -> bool:
        """Whether there are enough problems: more would only fill memory."""
        return len(self._problems) >= MAX_PROBLEMS

    def _more(self, absent: int, kind: str, file: str | None) -> None:
        if absent > MAX_PROBLEMS:
            what = f"{absent - MAX_PROBLEMS} more {kind} are absent"
            self._problems.append(finding(CheckpointFault.TOO_MANY_PROBLEMS, what, file=file))

    def _read(self, files: Iterable[str]) -> None:
        reader = read_header
        if self._chosen.format == "torch":
            from rtp_llm.checkpoint.torch_file import read_torch_file

            reader = read_torch_file
        for file in files:
            header = reader(self._root / file, file)
            self._headers[file] = header
            self._problems += header.problems
            self._notes += header.notes
            if self._enough():
                what = "so many problems that the files after this one were not looked at"
                self._problems.append(finding(CheckpointFault.TOO_MANY_PROBLEMS, what, file=file))
                return
            if sum(len(h.tensors) for h in self._headers.values()) > MAX_ALL_TENSORS:
                expected = f"at most {MAX_ALL_TENSORS} in all files"
                self._problems.append(finding(CheckpointFault.TOO_MANY_TENSORS, "too many tensors", file, None, expected, "more"))
                return

    def catalog(self, directory: str) -> Catalog:
        if not self._tensors and not self._problems:
            file = shown(next(iter(self._headers)))
            self._problems.append(
                finding(CheckpointFault.NO_WEIGHTS, "the file holds no tensor", file=file, expected="tensors", actual="none")
            )
        files = sorted((h.info for h in self._headers.values() if h.info), key=lambda f: f.name)
        return Catalog(
            directory,
            tuple(files),
            tuple(sorted(self._tensors, key=lambda t: t.name)),
            tuple(sorted(self._problems, key=Problem.sort_key)),
            tuple(sorted(self._notes, key=Problem.sort_key)),
        )


def _duplicate(tensor: TensorInfo, owner: str) -> Problem:
    return finding(
        CheckpointFault.DUPLICATE_TENSOR,
        "two files hold the tensor, and no index says which counts",
        file=tensor.file,
        tensor=tensor.name,
        expected="one file",
        actual=f"also in {shown(owner)}",
        fix="remove the files of another export, or add the index",
    )


def _shard_absent(file: str, tensors: list[str], named: int, present: int) -> Problem:
    return finding(
        CheckpointFault.SHARD_ABSENT,
        f"the index names a file that is not there, for {len(tensors)} tensors",
        file=file,
        tensor=tensors[0],
        expected=f"{named} shards",
        actual=f"{present} shards",
        fix="download the absent shards, or the index that belongs to these",
    )


def _tensor_absent(name: str, file: str, elsewhere: str | None) -> Problem:
    return finding(
        CheckpointFault.TENSOR_ABSENT,
        "the index says that the file holds the tensor, and it does not",
        file=file,
        tensor=name,
        expected="the tensor in this file",
        actual=f"it is in {shown(elsewhere)}" if elsewhere else "it is in no file of the index",
        fix="index and shards are of different exports: download both again",
    )


def _outside(file: str, extra: list[str], weight_map: dict[str, str]) -> Problem:
    copies = sum(name in weight_map for name in extra)
    what = f"{len(extra)} tensors that the index does not name here are ignored"
    if copies:
        what += f", {copies} of them copies of tensors in other files"
    examples = ", ".join(map(shown, extra[:3])) + (", ..." if len(extra) > 3 else "")
    return finding(CheckpointFault.OUTSIDE_INDEX, what, file=file, tensor=extra[0], actual=examples, expected="tensors of the index")
