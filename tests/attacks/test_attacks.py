"""Every hostile directory, through the library: the right fault, the right place, and nothing executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp_llm.checkpoint import CheckpointFault, read_catalog, read_config
from rtp_llm.errors import CheckpointError, Problem
from tests.attacks.hostile import ATTACKS, TENSORS, Attack


def findings(path: Path, attack: Attack) -> tuple[Problem, ...]:
    if attack.outcome == "config":
        with pytest.raises(CheckpointError) as caught:
            read_config(path)
        return caught.value.problems
    catalog = read_catalog(path)
    if attack.outcome == "problem":
        with pytest.raises(CheckpointError):
            catalog.raise_for_problems()
        return catalog.problems
    catalog.raise_for_problems()
    assert [t.name for t in catalog.tensors] == sorted(TENSORS), "a note changed what is loaded"
    return catalog.notes


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.name)
def test_attack_is_named(attack: Attack, place: Path) -> None:
    """The finding has the attack's fault, names its file and tensor, and is fit for a terminal; no code of the
    checkpoint ran."""
    found = findings(attack.build(place), attack)
    assert not (place / "executed").exists(), "the checkpoint's code was executed"
    if attack.fault is None:
        assert found == ()
        return
    matching = [p for p in found if p.fault is attack.fault]
    assert matching, [str(p) for p in found]
    if attack.file is not None:
        assert attack.file in {p.file for p in matching}
    if attack.tensor is not None:
        assert attack.tensor in {p.tensor for p in matching}
    for problem in found:
        assert str(problem).isprintable(), repr(str(problem))
        assert len(str(problem)) < 2000
    assert len(found) < 2100


def test_attacks_are_distinct() -> None:
    """Each attack is named once, and every fault of files has an attack that provokes it."""
    assert len({a.name for a in ATTACKS}) == len(ATTACKS)
    elsewhere = {
        CheckpointFault.UNREADABLE,  # needs a user who is not root
        CheckpointFault.UNSUPPORTED_TENSOR,  # tests/checkpoint/test_torch_file.py
        CheckpointFault.NO_INDEX,  # tests/checkpoint/test_read.py
        CheckpointFault.NOT_A_TENSOR,  # tests/checkpoint/test_torch_file.py
        CheckpointFault.NESTED_STATE_DICT,  # tests/checkpoint/test_torch_file.py
    }
    assert set(CheckpointFault) - {a.fault for a in ATTACKS} == elsewhere
