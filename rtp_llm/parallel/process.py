"""A process of the launch, and whether it still runs: asked of the kernel where both are on one host."""

from __future__ import annotations

import json
import os
import select
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType


def _host() -> str:
    """Processes with equal values see each other's process ids: one boot of one kernel, and one namespace of ids."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(slots=True)
class Process:
    """Process ``pid`` on ``host``; while the context is open, ``ended()`` asks for it through a pidfd (``pidfd_open(2)``)."""

    host: str
    pid: int
    _gone: bool = field(default=False, init=False)
    _fd: int | None = field(default=None, init=False)

    @classmethod
    def own(cls) -> Process:
        return cls(_host(), os.getpid())

    @classmethod
    def from_json(cls, text: bytes) -> Process:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps({"host": self.host, "pid": self.pid})

    def __enter__(self) -> Process:
        if self.host and self.host == _host():
            try:
                self._fd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                self._gone = True
            except OSError:
                pass  # a kernel before 5.3, or a sandbox that forbids it: silence has to tell
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def ended(self) -> bool:
        """Whether it is known to have ended; False also where it cannot be asked (another host)."""
        if self._fd is not None and not self._gone:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            self._gone = bool(poller.poll(0))
        return self._gone
