"""An allocator that counts: bytes that are allocated at a time, by torch on the CPU and by fastsafetensors."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

import fastsafetensors.frameworks._torch as package
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counting(TorchDispatchMode):
    """While the context is open, ``peak`` is the most bytes that were allocated within it and not yet freed."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._buffers: dict[int, int] = {}

    def _add(self, nbytes: int) -> None:
        with self._lock:
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._see(leaf.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        inside = any(start <= address < start + length for start, length in list(self._buffers.items()))
        if not nbytes or inside or storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        self._add(nbytes)
        weakref.finalize(storage, self._gone, storage._cdata, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self._add(-nbytes)

    def __enter__(self) -> Counting:
        self._malloc, self._free = package.cpu_malloc, package.cpu_free

        def malloc(length: int) -> int:
            address = self._malloc(length)
            self._buffers[address] = length
            self._add(length)
            return address

        def free(address: int) -> None:
            self._add(-self._buffers.pop(address))
            self._free(address)

        package.cpu_malloc, package.cpu_free = malloc, free
        super().__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        package.cpu_malloc, package.cpu_free = self._malloc, self._free
