"""Compiles what a back end compiles on first use, before there is a first use.

flashinfer's modules lie under its own directory, one for each version and GPU architecture; its names do not tell one CUDA
from another, so that is read from the libraries themselves.
"""

from __future__ import annotations

import fcntl
import logging
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_llm.installed import IMPORT_ERRORS
from rtp_llm.kernels.faults import KernelFault
from rtp_llm.kernels.offers import JitModule, Lack
from rtp_llm.kernels.symbols import Symbol, called

_log = logging.getLogger("rtp_llm.kernels")

#: What compiles a module.  Not ``build_jit_specs``, which compiles many at once: it leaves ninja's log elsewhere than where
#: flashinfer's own calls look for it, and they would compile everything once more.
_BUILD = Symbol("flashinfer.jit.core", "JitSpec.build", ("verbose",))
_CUDA_PATH = Symbol("flashinfer.jit.cpp_ext", "get_cuda_path")
SYMBOLS = (_BUILD, _CUDA_PATH)

#: The run-time library that a module was linked against, in its table of names.
_CUDART = re.compile(rb"libcudart\.so\.(\d+)")

#: Seconds after which compilers are given up: forty times what the slowest module took on 16 processors.
_LONGEST_S = 3600.0

#: Characters of a compiler's complaint that a message shows: its lines hold whole types.
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Compiled:
    """Modules that are needed, and those of them that had to be compiled; ``directory`` is where they lie."""

    modules: tuple[str, ...]
    fresh: tuple[str, ...]
    directory: str
    seconds: float


class CompileError(Exception):
    """Modules could not be compiled; ``failed`` are those for which no usable library is there."""

    def __init__(self, lack: Lack, failed: Sequence[JitModule]) -> None:
        super().__init__(lack.detail)
        self.lack = lack
        self.failed = tuple(failed)


def described(modules: Iterable[JitModule]) -> list[tuple[JitModule, Any]]:
    """Each module with the back end's description of it; compiles nothing.

    Raises:
        CompileError: one that cannot be described for this GPU.
    """
    found = []
    for module in modules:
        try:
            found.append((module, called(module.generate)(*module.arguments)))
        except (*IMPORT_ERRORS, ValueError, KeyError) as error:
            raise CompileError(
                Lack(KernelFault.COMPILE_FAILED, f"{module.generate.path}: {type(error).__name__}: {error}"), [module]
            ) from error
    return found


def cuda_major(library: Path) -> str | None:
    """The major version of CUDA that a library was linked against; None where there is no library or no trace of CUDA."""
    try:
        found = _CUDART.search(library.read_bytes())
    except OSError:
        return None
    return found.group(1).decode() if found else None


def check_tools(modules: Iterable[JitModule], cuda: str) -> None:
    """Whether what is not compiled for ``cuda`` (``13.0``) could be compiled here; compiles nothing.

    Ninja is also needed for what is compiled, since flashinfer asks it each time whether it still is.

    Raises:
        CompileError: ``NO_COMPILER``, with the modules that cannot be had; or as :func:`described`.
    """
    own = [(module, spec) for module, spec in described(modules) if not spec.is_aot]
    missing = [(module, spec) for module, spec in own if not _usable(spec, cuda)]
    no_ninja, no_nvcc = _no_ninja() if own else "", _no_nvcc() if missing else ""
    if no_ninja or no_nvcc:
        lack = Lack(KernelFault.NO_COMPILER, "; ".join(filter(None, (no_ninja, no_nvcc))))
        raise CompileError(lack, [module for module, _ in (own if no_ninja else missing)])


def _no_ninja() -> str:
    own = Path(sys.prefix) / "bin" / "ninja"
    hint = f", where {own.parent} should be" if own.exists() else ""
    return "" if shutil.which("ninja") else f"ninja is not on PATH{hint}"


def _no_nvcc() -> str:
    try:
        nvcc = Path(called(_CUDA_PATH)()) / "bin" / "nvcc"
    except RuntimeError as error:  # flashinfer's own words
        return str(error)
    return "" if nvcc.exists() else f"there is no {nvcc}"


def _usable(spec: Any, cuda: str) -> bool:
    """Whether a module is compiled, for this major version of CUDA (or by something that leaves no trace of it)."""
    library = Path(spec.get_library_path())
    return library.exists() and cuda_major(library) in (None, cuda.partition(".")[0])


def compile_modules(modules: Sequence[JitModule], cuda: str, watch: Progress) -> Compiled:
    """Compiles what is not there for ``cuda`` (``13.0``), modules side by side, and loads everything.

    Processes of one host take turns; whoever comes later finds all done.

    Raises:
        CompileError: with the modules that cannot be used.
    """
    began = time.monotonic()
    specs = described(modules)
    with _alone(Path(specs[0][1].build_dir).parent):
        own = [spec for _, spec in specs if not spec.is_aot]
        before = {spec.name: _modified(spec) for spec in own}
        for spec in own:
            # What an earlier try has left, too: flashinfer keeps the build file that it finds, with that try's compiler in it.
            if not _usable(spec, cuda) and Path(spec.build_dir).exists():
                shutil.rmtree(spec.build_dir)
        watch.begin([spec for spec in own if not _modified(spec)])
        _build(specs, own, cuda)
        _load(specs)
    fresh = tuple(spec.name for spec in own if _modified(spec) != before[spec.name])
    directory = str(Path(specs[0][1].build_dir).parent)
    return Compiled(tuple(spec.name for _, spec in specs), fresh, directory, time.monotonic() - began)


def _build(specs: Sequence[tuple[JitModule, Any]], own: Sequence[Any], cuda: str) -> None:
    """Each module by a ninja of its own, which takes all processors but for ``MAX_JOBS``: one file of some is most of the time."""
    errors: dict[str, str] = {}
    # Daemons, unlike the threads of a pool: a load that has failed does not wait for compilers.
    threads = [threading.Thread(target=_build_one, args=(spec, errors), name=f"rtp_llm-compile-{spec.name}", daemon=True) for spec in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        failed = [module for module, spec in specs if spec.name in errors]
        raise CompileError(Lack(KernelFault.COMPILE_FAILED, "; ".join(errors[name] for name in sorted(errors))), failed)
    failed = [module for module, spec in specs if not _usable(spec, cuda)]
    if failed:
        raise CompileError(Lack(KernelFault.OTHER_CUDA, f"torch was built with CUDA {cuda}, the compiler belongs to another"), failed)


def _build_one(spec: Any, errors: dict[str, str]) -> None:
    """Puts what the compiler complains of into ``errors`` where a module cannot be compiled, and all that it said into a file."""
    try:
        spec.build(verbose=False)
    except (RuntimeError, OSError) as error:
        said = str(error).splitlines() or [type(error).__name__]
        complaint = next((line for line in said if "error" in line.lower()), said[0])[:_MOST_CHARACTERS]
        output = Path(spec.build_dir) / "rtp_llm.log"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(said))
        errors[spec.name] = f"{spec.name}: {complaint} (all that was said is in {output})"


def _load(specs: Sequence[tuple[JitModule, Any]]) -> None:
    failed: dict[JitModule, str] = {}
    for module, spec in specs:
        try:
            called(module.load)(*module.arguments)
        except (*IMPORT_ERRORS, ValueError) as error:
            failed[module] = f"{spec.name} cannot be loaded: {str(error)[:_MOST_CHARACTERS]}"
    if failed:
        raise CompileError(Lack(KernelFault.COMPILE_FAILED, "; ".join(failed.values())), tuple(failed))


def _modified(spec: Any) -> int:
    """When a module's library was written; 0 where there is none."""
    library = Path(spec.get_library_path())
    return library.stat().st_mtime_ns if library.exists() else 0


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "rtp_llm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Progress:
    """How far a compilation is, seen from another thread by the objects that are there."""

    def __init__(self) -> None:
        self._objects: tuple[Path, ...] = ()

    def begin(self, specs: Sequence[Any]) -> None:
        """Says what will be compiled."""
        self._objects = tuple(Path(path) for spec in specs for path in spec.get_object_paths())
        if specs:
            where = Path(specs[0].build_dir).parent
            _log.info("compiling %d modules of kernels, %d files, into %s", len(specs), len(self._objects), where)

    @property
    def text(self) -> str:
        """``3 of 7 files compiled``."""
        if not self._objects:
            return "waiting for another process, or loading"
        return f"{sum(path.exists() for path in self._objects)} of {len(self._objects)} files compiled"


class Compilation:
    """A compilation in a thread of its own: weights are read meanwhile, and the compiler is another process anyway."""

    def __init__(self, modules: Sequence[JitModule], cuda: str) -> None:
        self.progress = Progress()
        self._modules = tuple(modules)
        self._result: Compiled | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(tuple(modules), cuda), name="rtp_llm-compile", daemon=True)
        self._thread.start()

    def _run(self, modules: Sequence[JitModule], cuda: str) -> None:
        try:
            self._result = compile_modules(modules, cuda, self.progress)
        # Whatever it is belongs to the thread that waits.
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def result(self, every_s: float, tell: Callable[[str], None], check: Callable[[], None]) -> Compiled:
        """Waits for the end; meanwhile calls ``tell`` every ``every_s`` seconds with how far it is, and ``check`` more often.

        Raises:
            CompileError: as :func:`compile_modules`, or where the end does not come; and whatever ``check`` raises.
        """
        began = said = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            check()
            if time.monotonic() - began > _LONGEST_S:
                detail = f"not done after {_LONGEST_S:.0f} s: {self.progress.text}"
                raise CompileError(Lack(KernelFault.COMPILE_FAILED, detail), self._modules)
            if time.monotonic() - said >= every_s and self._thread.is_alive():
                said = time.monotonic()
                tell(self.progress.text)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
