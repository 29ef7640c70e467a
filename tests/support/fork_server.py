"""Processes that begin where imports end: a server imports what they need once, and forks each of them.

``ForkServer(["torch"]).start(["-m", "package.module", "argument"], ...)`` is ``python -m package.module argument`` with
all that a process of its own has: session, process group, environment, output files, exit code, the interpreter's own
end.  What it does not show is what an interpreter imports and takes by itself; tests of that start one.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.paths import ROOT, child_env

#: The name of the imported file, as long as it has none in a package.
TARGET = "rank_target"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code (negative for a signal), processor seconds, and peak memory in MiB."""

    code: int
    seconds: float
    mib: float


@dataclass(frozen=True, slots=True)
class Fork:
    """A process of a server."""

    pid: int
    server: ForkServer

    def wait(self) -> int:
        return self.ended().code

    def ended(self) -> Ended:
        """Waits for its end; to be called once."""
        return Ended(*self.server.ask("wait", self.pid))


class ForkServer:
    """``imports`` are modules, or files, which are imported under the name ``TARGET``; the environment is ``child_env()``'s.

    The server ends with this object, or when this process has ended in whatever way, and so do the processes that it forked.
    """

    def __init__(self, imports: Sequence[str]) -> None:
        self.environ = child_env()
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, *imports],
            env=self.environ,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        weakref.finalize(self, self._server.communicate)

    def start(self, command: Sequence[str], environ: Mapping[str, str], out: Path, err: Path) -> Fork:
        """Runs ``python *command``, which begins with ``-m``, from the root of the working tree; output is added to two files."""
        dash_m, module, *arguments = command
        assert dash_m == "-m", command
        (pid,) = self.ask("start", module, arguments, dict(environ), str(out), str(err))
        return Fork(pid, self)

    def run(self, command: Sequence[str], timeout: float) -> tuple[Ended, str, str]:
        """Runs it to its end, or kills it after ``timeout`` seconds; returns also its stdout and stderr."""
        with tempfile.TemporaryDirectory(prefix="fork-") as folder:
            files = [Path(folder, name) for name in ("out", "err")]
            for file in files:
                file.touch()
            fork = self.start(command, child_env(), *files)
            timer = threading.Timer(timeout, os.killpg, (fork.pid, signal.SIGKILL))
            timer.start()
            ended = fork.ended()
            timer.cancel()
            out, err = (file.read_text(errors="replace") for file in files)
            return ended, out, err

    def ask(self, *request: object) -> list[Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, f"the server of forks has ended with {self._server.wait()}"
        found: list[Any] = json.loads(answer)
        return found


def import_file(file: str) -> ModuleType:
    """The module of a file that need not be importable by name."""
    spec = importlib.util.spec_from_file_location(TARGET, file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[TARGET] = module
    spec.loader.exec_module(module)
    return module


def _serve() -> str | None:
    """Answers one line of JSON by another until there are no more; in a fork returns the module that it is to run."""
    running = set()
    for line in iter(sys.stdin.readline, ""):
        word, *rest = json.loads(line)
        if word == "start":
            assert len(os.listdir("/proc/self/task")) == 1, "an import has started threads, which a fork would lack"
            pid = os.fork()
            if pid == 0:
                return _become(*rest)
            running.add(pid)
        else:
            pid, status, used = os.wait4(rest[0], 0)
            running.remove(pid)
            _answer(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)
    return None


def _become(module: str, arguments: list[str], environ: dict[str, str], out: str, err: str) -> str:
    os.setsid()
    _answer(os.getpid())  # not by the server: whoever reads it may signal the group at once
    for path, flags, fd in ((os.devnull, os.O_RDONLY, 0), (out, os.O_WRONLY | os.O_APPEND, 1), (err, os.O_WRONLY | os.O_APPEND, 2)):
        opened = os.open(path, flags)
        os.dup2(opened, fd)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = arguments
    return module


def _answer(*values: float) -> None:
    print(json.dumps(values), flush=True)


def _main() -> None:
    for name in sys.argv[1:]:
        if name.endswith(".py"):
            import_file(name)
        else:
            importlib.import_module(name)
    gc.freeze()  # what a fork's collector does not look at stays shared
    module = _serve()
    if module is not None:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
