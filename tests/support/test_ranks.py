"""The helper that other tests trust: it must tell a failed, a killed and a hanging rank from a good one."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RanksFailed, RanksTimedOut, run_commands, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return dist_rank(), torch.get_num_threads(), total.item()


def dist_rank() -> int:
    return int(os.environ["RANK"])


def one_of_three_ends_badly(how: str) -> None:
    print("x" * 200_000)  # More than a pipe holds.
    if dist_rank() != 1:
        return
    if how == "raise":
        raise ValueError("rank 1 says why")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_ranks_meet_over_gloo_and_return_values() -> None:
    """Each rank knows its number, has one torch thread, meets the others, and its value comes back in rank order."""
    results = run_ranks(3, sum_of_ranks, 10)
    assert [result.value for result in results] == [(rank, 1, 33.0) for rank in range(3)]


def test_failed_rank_is_named_with_its_reason() -> None:
    """``check`` turns an exit code into an assertion that shows the rank's own words."""
    with pytest.raises(RanksFailed, match=r"ranks \[1\] failed[\s\S]*rank 1 says why"):
        run_ranks(3, one_of_three_ends_badly, "raise")


def test_killed_rank_shows_its_signal() -> None:
    """A rank that was killed has the signal as its exit code; without ``check`` the caller judges."""
    codes = [result.returncode for result in run_ranks(3, one_of_three_ends_badly, "kill", check=False)]
    assert codes == [0, -signal.SIGKILL, 0]


def test_hanging_rank_is_killed_and_shows_where_it_hung() -> None:
    """At the time-out every process is gone, and the stack of the one that hung is in the message."""
    with pytest.raises(RanksTimedOut, match=r"ranks \[1\] did not end[\s\S]*in one_of_three_ends_badly") as caught:
        run_ranks(3, one_of_three_ends_badly, "hang", timeout=5)
    assert [result.returncode for result in caught.value.results][1] == -signal.SIGABRT


def test_commands_differ_by_rank() -> None:
    """Each rank may run another command line; children of a rank do not outlive it."""
    script = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(sys.argv[1], p.pid)"
    )
    results = run_commands([["-c", script, "a"], ["-c", script, "b"]])
    words = [result.stdout.split() for result in results]
    assert [word[0] for word in words] == ["a", "b"]
    assert gone({int(word[1]) for word in words})


def gone(pids: set[int]) -> bool:
    """Whether none of them runs any more; a killed process takes a moment to go."""
    deadline = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether a process runs; one that was killed and only waits to be reaped does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_alive_tells_the_living() -> None:
    """The check above can say yes."""
    assert alive(os.getpid())
