"""Hugging Face's ``*.index.json``: which tensors a checkpoint has, and in which file each lies.

``weight_map`` is an allow-list of tensors: others are not part of the checkpoint, even in a file that it names.
"""

from __future__ import annotations

from pathlib import Path

from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.files import finding, read_json, shown
from rtp_llm.checkpoint.header import MAX_PROBLEMS, name_problem
from rtp_llm.errors import CheckpointError, Problem

#: Room for 300,000 entries of 100 characters; DeepSeek-V3's index has 9 MB.  A string of this length may take four times
#: as much once its escapes are read.
MAX_INDEX_BYTES = 32_000_000

#: The longest file name that Linux file systems hold.
MAX_FILE_NAME = 255


def read_index(path: Path, file: str) -> dict[str, str]:
    """``weight_map`` of an index: tensor name -> file name, each a plain name inside the checkpoint's directory.

    Raises CheckpointError with all problems.
    """
    data = read_json(path, file, MAX_INDEX_BYTES)
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        actual = "nothing" if weight_map is None else "an empty object" if weight_map == {} else type(weight_map).__name__
        raise CheckpointError(
            finding(CheckpointFault.BAD_INDEX, "no weight_map", file, None, "an object of tensor name: file name", actual)
        )
    problems: list[Problem] = []
    good_names: set[str] = set()
    for name, target in weight_map.items():
        problem = name_problem(name, file)
        if problem is None and not (isinstance(target, str) and target in good_names):
            problem = _target_problem(name, target, file)
            if problem is None:
                good_names.add(target)
        if problem is not None:
            problems.append(problem)
            if len(problems) >= MAX_PROBLEMS:
                problems.append(finding(CheckpointFault.TOO_MANY_PROBLEMS, f"{MAX_PROBLEMS} problems; the rest was not looked at", file))
                break
    if problems:
        raise CheckpointError(problems)
    return weight_map


def _target_problem(name: str, target: object, file: str) -> Problem | None:
    if not isinstance(target, str):
        return finding(CheckpointFault.BAD_INDEX, "the tensor's file is not a string", file, name, "a file name", shown(repr(target)))
    plain = target not in ("", ".", "..") and not set(target) & set("/\\\0") and target.isprintable()
    if plain and len(target.encode()) <= MAX_FILE_NAME:
        return None
    expected = "a plain file name in the checkpoint's directory"
    return finding(
        CheckpointFault.UNSAFE_FILE_NAME,
        "the index leads out of the directory",
        file,
        name,
        expected,
        repr(shown(target)),
        "do not trust this checkpoint",
    )
