"""Compiles a back end's modules before their first use.

flashinfer keeps its modules in its own directory, one for each version and GPU architecture.  The directory's name does not say
which CUDA a module was compiled with, so that is read from the library itself.
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
from rtp_llm.kernels.functions import JitModule, Unsupported
from rtp_llm.kernels.symbols import Symbol, called

_log = logging.getLogger("rtp_llm.kernels")

#: Compiles one module.  Not ``build_jit_specs``, which compiles many at once: it writes ninja's log to another place than
#: flashinfer's own calls read, and they would compile everything again.
_BUILD = Symbol("flashinfer.jit.core", "JitSpec.build", ("verbose",))
_CUDA_PATH = Symbol("flashinfer.jit.cpp_ext", "get_cuda_path")
SYMBOLS = (_BUILD, _CUDA_PATH)

#: The name of the CUDA run-time library that a module was linked against.
_CUDART = re.compile(rb"libcudart\.so\.(\d+)")

#: Seconds after which a compilation is given up: forty times what the slowest module took on 16 processors.
_LONGEST_S = 3600.0

#: Characters of a compiler's error that a message shows: one line can name many C++ types.
_MOST_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Compiled:
    """The modules that are needed, and those (``fresh``) that had to be compiled, in ``directory``."""

    modules: tuple[str, ...]
    fresh: tuple[str, ...]
    directory: str
    seconds: float


class CompileError(Exception):
    """Modules could not be compiled; ``failed`` are those without a usable library."""

    def __init__(self, unsupported: Unsupported, failed: Sequence[JitModule]) -> None:
        super().__init__(unsupported.detail)
        self.unsupported = unsupported
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
                Unsupported(KernelFault.COMPILE_FAILED, f"{module.generate.path}: {type(error).__name__}: {error}"), [module]
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
    """Checks that modules not yet compiled for ``cuda`` (``13.0``) could be compiled here; compiles nothing.

    Compiled modules need ninja too: flashinfer asks it at each use whether they are up to date.

    Raises:
        CompileError: ``NO_COMPILER``, with the modules that cannot be compiled; or as :func:`described`.
    """
    own = [(module, spec) for module, spec in described(modules) if not spec.is_aot]
    missing = [(module, spec) for module, spec in own if not _usable(spec, cuda)]
    no_ninja, no_nvcc = _no_ninja() if own else "", _no_nvcc() if missing else ""
    if no_ninja or no_nvcc:
        unsupported = Unsupported(KernelFault.NO_COMPILER, "; ".join(filter(None, (no_ninja, no_nvcc))))
        raise CompileError(unsupported, [module for module, _ in (own if no_ninja else missing)])


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
    """Whether a module is compiled for this major version of CUDA, or names no version."""
    library = Path(spec.get_library_path())
    return library.exists() and cuda_major(library) in (None, cuda.partition(".")[0])


def compile_modules(modules: Sequence[JitModule], cuda: str, watch: CompileProgress) -> Compiled:
    """Compiles the modules that are missing for ``cuda`` (``13.0``), in parallel, and loads all.

    Processes of one host take turns; later ones find the modules compiled.

    Raises:
        CompileError: with the modules that cannot be used.
    """
    began = time.monotonic()
    specs = described(modules)
    with _alone(Path(specs[0][1].build_dir).parent):
        own = [spec for _, spec in specs if not spec.is_aot]
        before = {spec.name: _modified(spec) for spec in own}
        for spec in own:
            # Also what a failed try left: flashinfer would reuse its build file, which names the compiler of that try.
            if not _usable(spec, cuda) and Path(spec.build_dir).exists():
                shutil.rmtree(spec.build_dir)
        watch.begin([spec for spec in own if not _modified(spec)])
        _build(specs, own, cuda)
        _load(specs)
    fresh = tuple(spec.name for spec in own if _modified(spec) != before[spec.name])
    directory = str(Path(specs[0][1].build_dir).parent)
    return Compiled(tuple(spec.name for _, spec in specs), fresh, directory, time.monotonic() - began)


def _build(specs: Sequence[tuple[JitModule, Any]], own: Sequence[Any], cuda: str) -> None:
    """One ninja for each module, because a single file can take most of the time; each uses all processors, or ``MAX_JOBS``."""
    errors: dict[str, str] = {}
    # Daemon threads, unlike a pool's: a failed load must not wait for compilers.
    threads = [threading.Thread(target=_build_one, args=(spec, errors), name=f"rtp_llm-compile-{spec.name}", daemon=True) for spec in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        failed = [module for module, spec in specs if spec.name in errors]
        raise CompileError(Unsupported(KernelFault.COMPILE_FAILED, "; ".join(errors[name] for name in sorted(errors))), failed)
    failed = [module for module, spec in specs if not _usable(spec, cuda)]
    if failed:
        raise CompileError(
            Unsupported(KernelFault.OTHER_CUDA, f"torch was built with CUDA {cuda}, the compiler belongs to another"), failed
        )


def _build_one(spec: Any, errors: dict[str, str]) -> None:
    """Compiles a module.  A failure adds the error line to ``errors`` and writes the whole output to a file."""
    try:
        spec.build(verbose=False)
    except (RuntimeError, OSError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        complaint = next((line for line in lines if "error" in line.lower()), lines[0])[:_MOST_CHARACTERS]
        output = Path(spec.build_dir) / "rtp_llm.log"
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("\n".join(lines))
        errors[spec.name] = f"{spec.name}: {complaint} (all that was said is in {output})"


def _load(specs: Sequence[tuple[JitModule, Any]]) -> None:
    failed: dict[JitModule, str] = {}
    for module, spec in specs:
        try:
            called(module.load)(*module.arguments)
        except (*IMPORT_ERRORS, ValueError) as error:
            failed[module] = f"{spec.name} cannot be loaded: {str(error)[:_MOST_CHARACTERS]}"
    if failed:
        raise CompileError(Unsupported(KernelFault.COMPILE_FAILED, "; ".join(failed.values())), tuple(failed))


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


class CompileProgress:
    """How far a compilation is: counts the object files that exist.  May be read from any thread."""

    def __init__(self) -> None:
        self._objects: tuple[Path, ...] = ()

    def begin(self, specs: Sequence[Any]) -> None:
        """Sets what will be compiled."""
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
    """A compilation in a background thread, while weights are read."""

    def __init__(self, modules: Sequence[JitModule], cuda: str) -> None:
        self.progress = CompileProgress()
        self._modules = tuple(modules)
        self._result: Compiled | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(tuple(modules), cuda), name="rtp_llm-compile", daemon=True)
        self._thread.start()

    def _run(self, modules: Sequence[JitModule], cuda: str) -> None:
        try:
            self._result = compile_modules(modules, cuda, self.progress)
        # Any exception is raised again in the thread that waits.
        except BaseException as error:  # noqa: BLE001
            self._error = error

    def result(self, every_s: float, tell: Callable[[str], None], check: Callable[[], None]) -> Compiled:
        """Waits for the end.  Calls ``tell`` with the progress every ``every_s`` seconds, and ``check`` more often.

        Raises:
            CompileError: as :func:`compile_modules`, or after a timeout; and whatever ``check`` raises.
        """
        began = last = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(0.2)
            check()
            if time.monotonic() - began > _LONGEST_S:
                detail = f"not done after {_LONGEST_S:.0f} s: {self.progress.text}"
                raise CompileError(Unsupported(KernelFault.COMPILE_FAILED, detail), self._modules)
            if time.monotonic() - last >= every_s and self._thread.is_alive():
                last = time.monotonic()
                tell(self.progress.text)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
