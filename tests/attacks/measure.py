"""Runs a command and prints its exit code, output, processor seconds and peak memory as JSON.

It has a process of its own because Linux counts the memory of the process that forks to the peak of its child, and
that of a test session is large.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys


def main() -> None:
    limit, command = float(sys.argv[1]), sys.argv[2:]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        print(json.dumps({"code": None, "out": "", "err": f"still running after {limit} s", "seconds": limit, "mib": 0}))
        return
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, mib = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(json.dumps({"code": done.returncode, "out": done.stdout, "err": done.stderr, "seconds": seconds, "mib": mib}))


if __name__ == "__main__":
    main()
