"""Forked processes are like fresh ones: nothing of one is seen by the next, and none outlives who asked for it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import Ended, ForkServer
from tests.support.paths import child_env
from tests.support.ranks import run_commands, run_ranks
from tests.support.test_ranks import alive, gone

SEEN: list[str] = []


def leaves_traces() -> tuple[int, bool, list[str], str | None]:
    """Who forked it, whether it leads a session, what it finds of other calls; and leaves as much itself."""
    found = os.getppid(), os.getsid(0) == os.getpid(), [*SEEN, *(p for p in sys.path if p == "trace")], os.environ.get("TRACE")
    SEEN.append("trace")
    sys.path.append("trace")
    os.environ["TRACE"] = "trace"
    return found


def test_ranks_see_nothing_of_each_other() -> None:
    """Modules, paths and variables that a rank changes are its own; all ranks of a file come from one server, which is not the
    test's own process."""
    found = [result.value for _ in range(2) for result in run_ranks(2, leaves_traces)]
    assert [rest for _, *rest in found] == [[True, [], None]] * 4
    assert len({parent for parent, *_ in found}) == 1 and found[0][0] != os.getpid()


def test_a_rank_of_another_environment_is_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries read variables as they are imported: where one differs, by ``env`` or in the test's own, the interpreter is fresh, and
    has it; the next ranks have not."""
    assert [result.value[::3] for result in run_ranks(1, leaves_traces, env={"TRACE": "given"})] == [(os.getpid(), "given")]
    with monkeypatch.context() as patch:
        patch.setenv("TRACE", "set")
        assert [result.value[::3] for result in run_ranks(1, leaves_traces)] == [(os.getpid(), "set")]
    (result,) = run_ranks(1, leaves_traces)
    assert result.value[0] != os.getpid() and result.value[3] is None


def says_all() -> None:
    """What only the end of an interpreter brings out."""
    atexit.register(print, "at exit")
    print("at once", sys.stdin.read() == "", file=sys.stderr)


def test_a_fork_ends_as_an_interpreter_does() -> None:
    """What was registered for the end runs, output is written, stdin is empty; a module's exit code is the process's."""
    (result,) = run_ranks(1, says_all)
    assert (result.stdout, result.stderr) == ("at exit\n", "at once True\n")
    results = run_commands([["-m", "rtp_llm.cli", "inspect", "/nothing"], ["-m", "rtp_llm.cli", "--help"]], check=False)
    assert [result.returncode for result in results] == [1, 0] and results[1].stdout.startswith("Usage: rtp-llm")


def test_processor_seconds_and_memory_are_its_own(tmp_path: Path) -> None:
    """What is told of a process counts neither its siblings nor what the server took to import."""
    server = ForkServer(["json.tool"])
    (tmp_path / "small").write_text("[]")
    (tmp_path / "large").write_text(json.dumps(list(range(1_000_000))))

    def run(name: str) -> Ended:
        return server.run(["-m", "json.tool", str(tmp_path / name)], 60)[0]

    before, large, after = run("small"), run("large"), run("small")
    assert (before.code, large.code, after.code) == (0, 0, 0)
    assert before.seconds < large.seconds > after.seconds
    assert large.mib > 40 and before.mib < 30 > after.mib


def test_a_fork_that_takes_too_long_is_killed() -> None:
    """``run`` has a limit of time; what was said until then is told."""
    ended, out, err = ForkServer(["timeit"]).run(["-m", "timeit", "-s", "print('begun', flush=True)", "-n", "1", "while 1: pass"], 1.0)
    assert (ended.code, out.splitlines()[0], err) == (-signal.SIGKILL, "begun", "")


def test_imports_with_threads_are_refused(tmp_path: Path) -> None:
    """A fork has one thread, so whatever an import's threads do would be missing in it."""
    (tmp_path / "threads.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
    server = ForkServer([str(tmp_path / "threads.py")])
    with pytest.raises(AssertionError, match="has ended with 1"):
        server.start(["-m", "this"], child_env(), tmp_path / "out", tmp_path / "out")


def hangs(folder: str) -> None:
    """With a child of its own."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, os.environ["RANK"]).write_text(f"{os.getppid()} {os.getpid()} {child.pid}")
    time.sleep(600)


def test_nothing_outlives_a_test_session_that_is_killed(tmp_path: Path) -> None:
    """The server sees its end, and takes the ranks and their children with it."""
    script = f"from tests.support import test_fork_server as t; t.run_ranks(2, t.hangs, {str(tmp_path)!r})"
    session = subprocess.Popen([sys.executable, "-c", script], env=child_env())
    marks = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 60
    while not all(mark.exists() and mark.read_text() for mark in marks):
        assert session.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    session.send_signal(signal.SIGKILL)
    session.wait()
    pids = {int(word) for mark in marks for word in mark.read_text().split()}
    assert len(pids) == 5 and gone(pids)


def threads() -> list[Any]:
    return [len(os.listdir("/proc/self/task")), threading.active_count(), sorted({"torch", "rtp_llm.loader"} - sys.modules.keys())]


def test_ranks_begin_with_imports_and_one_thread() -> None:
    """No thread of torch's is lost, since there was none."""
    assert [result.value for result in run_ranks(2, threads)] == [[1, 1, []]] * 2


def test_a_server_ends_when_others_are_asked_for() -> None:
    """Ranks of other imports have another server; and servers take memory, so that there are two at most."""
    (result,) = run_ranks(1, leaves_traces)
    for module in ("json.tool", "calendar"):
        assert alive(result.value[0])
        run_commands([["-m", module, "--help"]], imports=[module])
    assert gone({result.value[0]})
