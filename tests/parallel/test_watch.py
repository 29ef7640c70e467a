"""A watch tells a rank that is late from one that is lost."""

from __future__ import annotations

import time

import pytest
from torch._C._distributed_c10d import HashStore

from rtp_llm.errors import ParallelError
from rtp_llm.parallel import watch as watch_module
from rtp_llm.parallel.watch import Watch


def test_a_rank_that_opens_its_watch_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps a program may keep a rank for as long as the time-out allows; silence after the first beat is
    another matter, and so is a rank that does not follow where all have just met."""
    monkeypatch.setattr(watch_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watch_module, "LOST_SECONDS", 0.5)
    store = HashStore()
    with Watch(store, 0, 2, 20.0, first_beat_s=20.0) as early:
        time.sleep(1.5)
        early.check()
        with Watch(store, 1, 2, 20.0, first_beat_s=20.0):
            time.sleep(0.5)
            early.check()
    with Watch(HashStore(), 0, 2, 20.0, first_beat_s=0.5) as alone, pytest.raises(ParallelError, match="RANK_LOST"):
        alone.exchange(b"is anyone there")


def test_a_rank_that_fails_stays_until_its_peers_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun ends the other ranks when one has ended: by then they have its error and can tell it."""
    monkeypatch.setattr(watch_module, "BEAT_SECONDS", 0.3)
    store = HashStore()
    with Watch(store, 0, 2, 20.0) as peer:
        with pytest.raises(ZeroDivisionError), Watch(store, 1, 2, 20.0):
            raise ZeroDivisionError("a defect")
        with pytest.raises(ParallelError, match="a defect"):
            peer.check()
