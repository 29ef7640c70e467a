"""A watch tells a rank that is late from one that is lost."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch._C._distributed_c10d import HashStore

from rtp_llm.errors import ParallelError
from rtp_llm.parallel import watch as watch_module
from rtp_llm.parallel.process import Process
from rtp_llm.parallel.watch import Watch


def test_a_rank_that_opens_its_watch_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps a program may keep a rank for as long as the time-out allows; silence after the first beat is
    another matter, and so is a rank that does not follow where all have just met."""
    monkeypatch.setattr(watch_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(watch_module, "LOST_SECONDS", 0.5)
    store = HashStore()
    with Watch(store, 0, 2, 20.0, together=False) as early:
        time.sleep(1.5)
        early.check()
        with Watch(store, 1, 2, 20.0, together=False):
            time.sleep(0.5)
            early.check()
    with Watch(HashStore(), 0, 2, 20.0) as alone, pytest.raises(ParallelError, match="RANK_LOST"):
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


def test_a_process_that_ended_is_known_at_once_and_silence_is_given_time() -> None:
    """The kernel tells of a peer on this host; one on another host is only ever silent, and never taken for ended."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here, there = Process(Process.own().host, child.pid), Process("another host", child.pid)
        with here, there:
            assert not here.ended() and not there.ended()
            child.kill()
            child.wait()
            assert here.ended() and not there.ended()
    with Process(Process.own().host, child.pid) as late:
        assert late.ended()
    assert Process.from_json(Process.own().to_json().encode()) == Process.own()


def test_a_peer_that_died_is_named_long_before_silence_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is gone without a word is lost within a few beats; one that said that it is done before it ended is not."""
    monkeypatch.setattr(watch_module, "BEAT_SECONDS", 0.1)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait()
    for last_beat, outcome in (("7", "a rank died"), ("done", None)):
        store = HashStore()
        store.set("process/1", Process(Process.own().host, child.pid).to_json())
        store.set("beat/1", last_beat)
        with Watch(store, 0, 2, 600.0) as watch:
            if outcome is None:
                time.sleep(1)
                watch.check()
                continue
            with pytest.raises(ParallelError, match=outcome):
                while True:
                    watch.check()
                    time.sleep(0.01)
