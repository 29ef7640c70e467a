"""Packages named fastsafetensors that are not as they should be, for the import system and the probe to meet for real.

Each is a folder for the front of ``PYTHONPATH``; those that start with ``REAL`` are the installed package, changed as a
broken or foreign build would differ.
"""

from __future__ import annotations

from pathlib import Path

import fastsafetensors

#: A package that is the installed one, under the same name: its folder is the installed one's.
REAL = f"""
__path__ = [{str(Path(fastsafetensors.__file__).parent)!r}]
exec(compile(open({fastsafetensors.__file__!r}).read(), {fastsafetensors.__file__!r}, "exec"))
"""

_AUTO = """
class AutoLoader:
    def __init__(self, {parameters}): pass
    def iterate_weights(self): yield from ()
    def close(self): pass
"""


def planted(folder: Path, source: str, **modules: str) -> Path:
    """Writes the package into ``folder``, which goes to the front of the path."""
    package = folder / "fastsafetensors"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    return folder


def with_parameters(parameters: str) -> str:
    """A package whose AutoLoader has these parameters and does nothing."""
    return _AUTO.format(parameters=parameters)


#: An AutoLoader that can be called, and none of the parts that it is made of.
WITHOUT_PARTS = with_parameters("pg, files, device='cpu'")

#: What an import raises, and what its record has to name.
IMPORTS = {
    "ImportError": "raise ImportError('libcudart.so.13: cannot open shared object file')",
    "OSError": "raise OSError('libnuma.so.1: wrong ELF class')",
    "RuntimeError": "raise RuntimeError('driver too old')",
    "AttributeError": "import os; os.no_such_symbol",
    "TypeError": "None()",
    "ModuleNotFoundError": "import a_module_that_is_not_there",
}

#: AutoLoaders that cannot be called as AutoLoader(group, files, device=...), or cannot be read or closed.
TOO_OLD = {
    "no AutoLoader": "class SafeTensorsFileLoader: pass",
    "only **kwargs": with_parameters("**kwargs"),
    "device in **kwargs": with_parameters("pg, files, **kwargs"),
    "one by position": with_parameters("files, *, pg=None, device='cpu'"),
    "positional-only": with_parameters("pg, files, device, /"),
    "one more that is needed": with_parameters("pg, files, device, stream"),
    "close() missing": "class AutoLoader:\n def __init__(self, pg, files, device='cpu'): pass\n def iterate_weights(self): yield from ()",
    "close() needs something": with_parameters("pg, files, device='cpu'").replace("def close(self)", "def close(self, force)"),
}

#: The installed package, failing in one place each.
FAILS = {
    "constructor": REAL
    + """
import fastsafetensors.parallel_loader as parallel
_init = parallel.PipelineParallel.__init__
class PipelineParallel(parallel.PipelineParallel):
    def __init__(self, pg, loader, hf_weights_files, queue_size, use_tqdm_on_load, overlap_io, borrowed_tensors, accumulate_resident):
        raise TypeError("PipelineParallel() takes other arguments")
parallel.PipelineParallel = PipelineParallel
""",
    "iteration": REAL
    + """
import fastsafetensors.parallel_loader as parallel
_iterate = parallel.PipelineParallel.iterate_weights
alive = []
def iterate_weights(self):
    import weakref
    inner = _iterate(self)
    try:
        for number, item in enumerate(inner):
            if number == 2:
                raise RuntimeError("undefined symbol: cuFileRead")
            alive.append(weakref.ref(item[1]))
            yield item
    finally:
        inner.close()
parallel.PipelineParallel.iterate_weights = iterate_weights
""",
    "close": REAL
    + """
import fastsafetensors.parallel_loader as parallel
def close(self):
    raise RuntimeError("close failed")
parallel.PipelineParallel.close = close
""",
    "iteration and close": REAL
    + """
import fastsafetensors.parallel_loader as parallel
def iterate_weights(self):
    raise RuntimeError("the first error")
    yield
parallel.PipelineParallel.iterate_weights = iterate_weights
def close(self):
    raise RuntimeError("the second error")
parallel.PipelineParallel.close = close
""",
}
