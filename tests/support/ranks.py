"""N real processes that torchrun could have started, for tests of what ranks do together.

``run_ranks(3, worker, "argument")`` calls a function in three processes; ``run_commands([...])`` gives each rank
a Python command line of its own.  Every process has torchrun's environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``, ...) and one torch thread.  As with torchrun, the rendezvous
store lives in the parent: its port is bound before any rank starts, so no port can be lost to another test, and it
outlives every rank.

Imports take longer than most ranks do, so ranks are forked from a server that has them (``tests.support.fork_server``),
unless that could make a difference: see ``_start``.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.support.fork_server import Fork, ForkServer
from tests.support.paths import ROOT, child_env

#: What ``rtp-llm`` imports to load a model, and what more to let it answer.
LOAD_IMPORTS = ("torch.distributed", "rtp_llm.cli.app", "rtp_llm.loader")
ANSWER_IMPORTS = (*LOAD_IMPORTS, "rtp_llm.runtime.tokenizer", "rtp_llm.runtime.generation", "transformers.modeling_utils")

#: Variables of pytest that change from test to test, and that no import reads.
UNREAD = frozenset({"PYTEST_CURRENT_TEST"})

#: How long a rank that hangs may take to print its stacks (faulthandler, on SIGABRT) before it is killed.
STACK_SECONDS = 2.0

#: Between two looks at the processes; a rank's ``seconds`` are this exact.
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class RankResult:
    """How one rank ended.  ``returncode`` is negative for a signal, as in ``subprocess``; ``seconds`` are from the
    common start to its end; ``value`` is what the function returned, None for commands and failed ranks."""

    rank: int
    returncode: int
    stdout: str
    stderr: str
    seconds: float
    value: Any = None

    def __str__(self) -> str:
        head = f"rank {self.rank}: exit code {self.returncode} after {self.seconds:.1f} s"
        return "\n".join([head, "--- stdout", self.stdout, "--- stderr", self.stderr])


class RanksFailed(AssertionError):
    """A rank failed, or did not end in time.  ``results`` has what every rank said."""

    def __init__(self, what: str, results: Sequence[RankResult]) -> None:
        self.results = tuple(results)
        super().__init__("\n".join([what, *map(str, results)]))


class RanksTimedOut(RanksFailed):
    """Some ranks had to be killed; their stacks are in their stderr."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    check: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[RankResult]:
    """Call ``function(*args)`` in ``size`` processes; results in rank order.

    ``function`` stands at the top level of a file, which is imported anew for ranks, so the file must do no work on
    import; it learns its rank from the environment and sets up its process group itself.  Arguments and the returned
    value travel by pickle (builtins, tensors, classes of importable modules).  Raises ``RanksTimedOut`` after
    ``timeout`` seconds, and with ``check`` ``RanksFailed`` where a rank's exit code is not 0.
    """
    file, name = inspect.getsourcefile(function), function.__qualname__
    assert file is not None and name.isidentifier(), f"{name} does not stand at the top level of a file"
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps(args))
        values = [Path(folder, f"value{rank}") for rank in range(size)]
        commands = [["-m", "tests.support.rank_main", file, name, str(call), str(value)] for value in values]
        results = run_commands(commands, timeout=timeout, check=check, env=env, imports=("torch.distributed", "rtp_llm.loader", file))
        return [_with_value(result, value) for result, value in zip(results, values, strict=True)]


def run_commands(
    commands: Iterable[Sequence[str]],
    *,
    timeout: float = 60.0,
    check: bool = True,
    env: Mapping[str, str] | None = None,
    imports: Sequence[str] = LOAD_IMPORTS,
) -> list[RankResult]:
    """Run ``python *command`` for each command, one rank each; e.g. ``["-m", "rtp_llm.cli", "load", path]``.

    Output goes through files, so a rank that says much blocks nobody.  ``imports`` are the modules that ranks find imported
    where they are forked.  Raises as ``run_ranks`` does.
    """
    commands = [list(command) for command in commands]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        start = _start(commands, env, tuple(imports))
        ranks = []
        try:
            for number, command in enumerate(commands):
                ranks.append(_Rank(number, command, _rank_env(number, len(commands), store.port, env), Path(folder), start))
            late = _wait(ranks, time.monotonic() + timeout)
        finally:
            for rank in ranks:
                rank.end()
        results = [rank.result() for rank in ranks]
    if late:
        raise RanksTimedOut(f"ranks {late} did not end within {timeout} s", results)
    failed = [result.rank for result in results if result.returncode]
    if check and failed:
        raise RanksFailed(f"ranks {failed} failed", results)
    return results


def _rank_env(rank: int, size: int, port: int, extra: Mapping[str, str] | None) -> dict[str, str]:
    names = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # torchrun's word for "rank 0 need not start the store, it is there".
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    return child_env({name: str(value) for name, value in names.items()} | dict(extra or {}))


#: Starts ``python *command`` with an environment, its stdout and its stderr added to two files.
_Start = Callable[[Sequence[str], Mapping[str, str], Path, Path], "Fork | subprocess.Popen[bytes]"]


def _start(commands: Sequence[Sequence[str]], env: Mapping[str, str] | None, imports: tuple[str, ...]) -> _Start:
    """How to start ranks: by forks, but from fresh interpreters where the environment is not the server's, since imports read it;
    where there is CUDA, whose driver does not survive a fork; and what is no module."""
    if env or torch.cuda.is_available() or any(command[0] != "-m" for command in commands):
        return _fresh
    server = _server(imports)
    return server.start if _read(server.environ) == _read(child_env()) else _fresh


def _read(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in UNREAD}


@lru_cache(maxsize=2)  # functions and commands of one test file
def _server(imports: tuple[str, ...]) -> ForkServer:
    """The server for just these imports: ranks find nothing that other files' ranks need."""
    return ForkServer(imports)


def _fresh(command: Sequence[str], environ: Mapping[str, str], out: Path, err: Path) -> subprocess.Popen[bytes]:
    with out.open("ab") as stdout, err.open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, *command],
            env=dict(environ),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )


class _Rank:
    """One process, the leader of its own process group so that its children end with it."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], folder: Path, start: _Start) -> None:
        self.rank = rank
        self.out, self.err = (folder / f"{rank}.{kind}" for kind in ("out", "err"))
        for file in (self.out, self.err):
            file.touch()
        self.started = time.monotonic()
        self.ended: float | None = None
        self.code: int | None = None
        self.process = start(command, env, self.out, self.err)

    def running(self) -> bool:
        if self.ended is None and self._state() == "Z":
            self.ended = time.monotonic()
        return self.ended is None

    def stopped(self) -> bool:
        """Whether it is frozen by a signal, and so will never end by itself."""
        return self._state() == "T"

    def _state(self) -> str:
        """``proc_pid_stat(5)``: the state behind the name; of a process that has ended it can be read until it is waited for."""
        return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass  # The whole group is gone, which is what is wanted.

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self.code = self.process.wait()
        self.ended = self.ended or time.monotonic()

    def result(self) -> RankResult:
        assert self.ended is not None and self.code is not None
        out, err = (file.read_bytes().decode(errors="replace") for file in (self.out, self.err))
        return RankResult(self.rank, self.code, out, err, self.ended - self.started)


def _any_runs(ranks: Sequence[_Rank]) -> bool:
    """Asks every rank, so that each one's end is noted when it happens."""
    return True in [rank.running() for rank in ranks]


def _wait(ranks: Sequence[_Rank], deadline: float) -> list[int]:
    """Until all have ended, only frozen ones are left, or the deadline; returns who had not ended, after they printed their stacks."""
    while _any_runs(ranks) and time.monotonic() < deadline:
        if all(rank.stopped() for rank in ranks if rank.running()):
            break
        time.sleep(POLL_SECONDS)
    late = [rank for rank in ranks if rank.running()]
    for rank in late:
        rank.signal(signal.SIGABRT)
    stacks_until = time.monotonic() + STACK_SECONDS
    while True in [rank.running() and not rank.stopped() for rank in late] and time.monotonic() < stacks_until:
        time.sleep(POLL_SECONDS)
    return [rank.rank for rank in late]


def _with_value(result: RankResult, file: Path) -> RankResult:
    if not file.exists():
        return result
    return RankResult(result.rank, result.returncode, result.stdout, result.stderr, result.seconds, pickle.loads(file.read_bytes()))
