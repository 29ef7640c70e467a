"""Reader threads are ready before there is work, do it once each, and are never left behind."""

from __future__ import annotations

import enum
import errno
import mmap
import os
import resource
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.errors import CheckpointError, TransportError
from rtp_llm.loader import load as loading
from rtp_llm.loader.budget import select_transport
from rtp_llm.loader.context import planning_context
from rtp_llm.loader.prepare import prepare
from rtp_llm.transport.interface import TransferStats
from rtp_llm.transport.scratch import pool as pool_module
from rtp_llm.transport.scratch import staging as staging_module
from rtp_llm.transport.scratch.pool import ReaderPool
from rtp_llm.transport.scratch.reader import _Work
from rtp_llm.transport.scratch.staging import Pinned, Staging, in_huge_pages
from tests.support.paths import child_env
from tests.support.tiny import save_tiny_llama

CPU = torch.device("cpu")


def readers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rtp_llm-read")]


def test_a_job_runs_once_in_every_thread() -> None:
    """Threads are there, each with its buffers, before the job is; each runs it once; they end with it."""
    ready = threading.Barrier(4)
    prepared = []

    class Counting(Staging):
        def __enter__(self) -> Staging:
            prepared.append(self)
            ready.wait(timeout=30)
            return super().__enter__()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rtp_llm.transport.scratch.pool.Staging", Counting)
        with ReaderPool[tuple[Staging, int]](CPU, 3, 64) as pool:
            ready.wait(timeout=30)
            assert len(prepared) == len(readers()) == 3
            with pool as again:  # whoever has the job
                done = again.work(lambda staging: (staging, threading.get_ident()))
            assert readers() == []
    assert {id(staging) for staging, _ in done} == {id(staging) for staging in prepared}
    assert len({thread for _, thread in done}) == 3


def test_without_a_job_the_threads_end() -> None:
    """Leaving the context is enough, with an error as well as without one."""
    with pytest.raises(KeyError), ReaderPool[int](CPU, 3, 64):
        raise KeyError
    pool = ReaderPool[int](CPU, 3, 64)
    with pool:
        pool.dismiss()
        assert readers() == []
    assert readers() == []


@pytest.mark.parametrize("where", ["preparing", "working"])
def test_an_error_of_one_thread_is_raised(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of getting buffers, or of the job; the others' results are not waited for."""
    first, stop = threading.Lock(), threading.Event()

    def once() -> None:
        if first.acquire(blocking=False):
            raise OSError("locked memory")

    def job(staging: Staging) -> int:
        if where == "working":
            once()
        assert stop.wait(timeout=30)
        return 1

    if where == "preparing":
        monkeypatch.setattr(Staging, "__enter__", lambda staging: once() or staging)
    with ReaderPool[int](CPU, 3, 64) as pool:
        with pytest.raises(OSError, match="locked memory"):
            pool.work(job)
        stop.set()
    assert readers() == []


def test_an_interrupt_anywhere_leaves_no_thread() -> None:
    """At whichever step it comes of giving out work and waiting for its end: the readers end, instead of waiting for a lock that the
    interrupted step has left locked."""
    for moment in count(1):
        steps = 0

        def step(frame: FrameType, event: str, arg: object, moment: int = moment) -> Any:
            nonlocal steps
            if Path(frame.f_code.co_filename).name not in ("pool.py", "reader.py", "threading.py", "_base.py"):
                return None  # such as what is called when an object goes, which swallows errors
            frame.f_trace_opcodes = True
            steps += event == "opcode"
            if event == "opcode" and steps == moment:
                raise KeyboardInterrupt
            return step

        work = _Work()

        def job(staging: Staging, work: _Work = work) -> int:
            with work:
                return sum(1 for _ in iter(work.next, None))

        before, interrupted = sys.gettrace(), False
        pool = ReaderPool[int](CPU, 2, 64)
        pool.__enter__()
        sys.settrace(step)
        try:
            assert sum(pool.work(job, lambda work=work: work.fill(iter([SimpleNamespace()] * 3)))) == 3
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(before)
        ending = threading.Thread(target=lambda work=work, pool=pool: (work.stop(), pool.dismiss()), daemon=True)
        ending.start()
        ending.join(timeout=30)
        assert not ending.is_alive(), f"step {moment}"
        if not interrupted:
            break
    assert moment > 50


def test_a_team_has_one_job() -> None:
    """A second one would be given what the first has returned."""
    with ReaderPool[int](CPU, 2, 64) as team:
        assert team.work(lambda staging: 1) == [1, 1]
        with pytest.raises(TransportError, match="INTERNAL.*second job"):
            team.work(lambda staging: 2)


def test_a_load_that_cannot_be_planned_leaves_no_thread(tmp_path: Path) -> None:
    """The threads that were to read it have started by then."""
    with pytest.raises(CheckpointError):
        load_model(tmp_path, load=LoadConfig(device="cpu"))
    assert readers() == []


def test_they_start_before_the_load_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, which fetches the others; and it is they who read it: nobody else does."""
    directory, seen = save_tiny_llama(tmp_path / "llama"), []
    plan, read = loading.prepare, os.preadv
    monkeypatch.setattr(loading, "prepare", lambda *args: (seen.append(set(readers())), plan(*args))[1])
    monkeypatch.setattr(os, "preadv", lambda *args: (seen.append({threading.current_thread().name}), read(*args))[1])
    load_model(directory, load=LoadConfig(device="cpu", reader_threads=3, kernels="torch"))
    pool = {f"rtp_llm-read-{number}" for number in range(3)}
    assert "rtp_llm-read-0" in seen[0] and set().union(*seen) <= pool and len(seen) > 1
    assert readers() == []


def test_a_team_that_is_not_needed_is_dismissed(tmp_path: Path) -> None:
    """Another transport is chosen: threads and buffers are gone before it counts the memory that is left."""
    context = planning_context(save_tiny_llama(tmp_path / "llama"), settings=LoadConfig(device="cpu", load_method="fastsafetensors"))
    with ReaderPool[TransferStats](CPU, 2, 64) as pool:
        chosen = select_transport(context, prepare(context), pool)
        assert (chosen.decision.method, readers()) == ("fastsafetensors", [])


def test_buffers_are_touched_by_the_thread_that_asks() -> None:
    """Three threads that get memory in huge pages are three threads: torch starts none for each of them."""
    script = """
import os, threading
import torch
from rtp_llm.transport.scratch.staging import in_huge_pages
torch.set_num_threads(8)
kept, done, leave = [], threading.Semaphore(0), threading.Event()
def work():
    kept.append(in_huge_pages(5 << 20))
    done.release()
    leave.wait(30)
before = len(os.listdir("/proc/self/task"))
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: done.acquire(timeout=30)
found = len(os.listdir("/proc/self/task")) - before
leave.set()
assert all(t.numel() == 5 << 20 and not t.any() and t.data_ptr() % (2 << 20) == 0 for t in kept)
print(found)
"""
    done = subprocess.run([sys.executable, "-c", script], env=child_env(), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr


class Runtime:
    """No CPU has CUDA's calls: this stands for a runtime that locks memory, or refuses every byte."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self._refused = refused
        runtime = SimpleNamespace(
            cudaError=enum.IntEnum("error", {"success": 0, "memory": 2}),
            cudaGetErrorString=lambda _: "out of memory",
            cudaHostRegister=lambda address, nbytes, flags: self._called("lock", nbytes),
            cudaHostUnregister=lambda address: self._called("unlock", 0),
        )
        monkeypatch.setattr(torch.cuda, "_cudart", runtime)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)

    def _called(self, name: str, nbytes: int) -> int:
        self.calls.append((name, nbytes))
        return self._refused


class OnHost(Staging):
    """A thread's buffers without a stream of a GPU."""

    def __init__(self, device: torch.device, buffer_bytes: int, pinned: torch.Tensor | None = None) -> None:
        super().__init__(CPU, buffer_bytes)
        self.pinned = pinned


CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """No CPU has a GPU to be near to."""
    monkeypatch.setattr(pool_module, "near_cpus", lambda device: None)


def test_memory_of_all_threads_is_locked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By whoever has touched the last part, before any thread works; unlocked when all have ended."""
    runtime = Runtime(monkeypatch)
    monkeypatch.setattr(pool_module, "Staging", OnHost)

    def job(staging: Any) -> tuple[int, int, list[tuple[str, int]]]:
        assert not staging.pinned.any()
        return staging.pinned.data_ptr(), staging.pinned.numel(), list(runtime.calls)

    with ReaderPool[Any](CUDA, 3, 3 << 20) as pool:
        found = pool.work(job)
        assert runtime.calls == [("lock", 18 << 20)]
    assert runtime.calls == [("lock", 18 << 20), ("unlock", 0)]
    assert len({address for address, _, _ in found}) == 3 and all(address % (2 << 20) == 0 for address, _, _ in found)
    assert {(nbytes, *calls) for _, nbytes, calls in found} == {(6 << 20, ("lock", 18 << 20))}


@pytest.mark.parametrize("when", ["before", "during"])
def test_memory_that_is_locked_late(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A thread that is still touching its part when the pool is gone locks nothing; what is being locked when one gives up is
    unlocked."""
    runtime = Runtime(monkeypatch)
    pinned = Pinned(2, 1 << 20)
    pinned.touch(0)
    if when == "before":
        pinned.release()
        pinned.touch(1)
        assert runtime.calls == []
        return
    lock = torch.cuda.cudart().cudaHostRegister
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *args: (pinned.give_up(), lock(*args))[1])
    pinned.touch(1)
    pinned.wait()
    pinned.release()
    assert runtime.calls == [("lock", 4 << 20), ("unlock", 0)]


def test_threads_stay_near_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reader runs on CPUs of the GPU's node, from before it touches its buffers; whoever started them runs where it ran."""
    Runtime(monkeypatch)
    monkeypatch.setattr(pool_module, "Staging", OnHost)
    allowed = os.sched_getaffinity(0)
    near = frozenset(sorted(allowed)[:1])
    monkeypatch.setattr(pool_module, "near_cpus", lambda device: near)
    touched: list[set[int]] = []
    touch = staging_module.Pinned.touch
    monkeypatch.setattr(
        staging_module.Pinned, "touch", lambda self, number: (touched.append(os.sched_getaffinity(0)), touch(self, number))[1]
    )
    with ReaderPool[set[int]](CUDA, 2, 64) as pool:
        assert pool.work(lambda staging: os.sched_getaffinity(0)) == [set(near)] * 2 == touched
    assert os.sched_getaffinity(0) == allowed


def test_one_thread_without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is the one that is told; the others do not wait for its part, and nothing is locked."""
    runtime, first = Runtime(monkeypatch), threading.Lock()

    class Failing(OnHost):
        def __enter__(self) -> Staging:
            if first.acquire(blocking=False):
                raise OSError("no stream")
            return super().__enter__()

    monkeypatch.setattr(pool_module, "Staging", Failing)
    with pytest.raises(OSError, match="no stream"), ReaderPool[int](CUDA, 3, 64) as pool:
        pool.work(lambda staging: 1)
    assert readers() == [] and runtime.calls == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_error_is_told(fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that cannot be unlocked is the error of a load that has none, and a line in the log of one that has failed before."""
    runtime = Runtime(monkeypatch)
    monkeypatch.setattr(pool_module, "Staging", OnHost)

    def job(staging: Staging) -> int:
        runtime._refused = 2  # from here on
        if fails:
            raise OSError("the disk has gone")
        return 1

    with pytest.raises(OSError if fails else RuntimeError, match="the disk has gone" if fails else "out of memory"):
        with ReaderPool[int](CUDA, 2, 64) as team, team as again:  # whoever has the job enters it once more
            again.work(job)
    assert readers() == [] and [name for name, _ in runtime.calls] == ["lock", "unlock"]
    assert ["could not be freed: out of memory" in text for text in caplog.messages] == [True] * fails


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_error_of_a_thread_is_told(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The same of copies that do not end, because of which, or before which, a thread fails."""

    def synchronize() -> None:
        raise RuntimeError("an illegal memory access")

    staging = Staging(CPU, 64)
    staging._stream = SimpleNamespace(synchronize=synchronize)  # type: ignore[assignment]  # no CPU has one
    with pytest.raises(OSError if fails else RuntimeError, match="the disk has gone" if fails else "illegal"), staging:
        if fails:
            raise OSError("the disk has gone")
    assert ["did not end: an illegal" in text for text in caplog.messages] == [True] * fails


@pytest.mark.parametrize(("limit", "told"), [((8 << 20, 8 << 20), "8388608 bytes"), ((-1, -1), "unlimited")])
def test_memory_that_cannot_be_locked(limit: tuple[int, int], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's refusal reaches whoever asked for the work as one of our errors: how much, which limit holds, what to do."""
    runtime = Runtime(monkeypatch, refused=2)
    monkeypatch.setattr(pool_module, "Staging", OnHost)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limit)
    with ReaderPool[int](CUDA, 2, 1 << 20) as pool, pytest.raises(TransportError) as caught:
        pool.work(lambda staging: 1)
    (problem,) = caught.value.problems
    assert problem.code == "LOCK_REFUSED" and "4194304 bytes (2 buffers for each of 2 threads)" in str(problem.expected)
    assert "out of memory (2)" in str(problem.actual) and f"ulimit -l) is {told}" in str(problem.actual)
    assert "--reader_threads" in str(problem.fix) and "--buffer_mib" in str(problem.fix)
    assert readers() == [] and runtime.calls == [("lock", 4 << 20)]


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is then of small ones: the kernel refuses the advice, and not the memory."""

    class Small(mmap.mmap):
        def madvise(self, *args: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(staging_module.mmap, "mmap", Small)
    memory = in_huge_pages(5 << 20)
    assert memory.numel() == 5 << 20 and not memory.any()
