"""Whether a process of the launch still runs; the kernel knows for those on the same host."""

from __future__ import annotations

import json
import os
import select
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType


def _host() -> str:
    """Equal for processes that share process ids: the same boot of a kernel, and the same pid namespace."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(slots=True)
class Process:
    """Process ``pid`` on ``host``; while the context is open, ``ended()`` polls its pidfd (``pidfd_open(2)``)."""

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
                pass  # a kernel before 5.3, or a sandbox that forbids it: only silence shows its end
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def ended(self) -> bool:
        """Whether it is known to have ended; False also for another host."""
        if self._fd is not None and not self._gone:
            poller = select.poll()
            poller.register(self._fd, select.POLLIN)
            self._gone = bool(poller.poll(0))
        return self._gone
