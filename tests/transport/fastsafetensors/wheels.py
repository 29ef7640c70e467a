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

_WORKING = """
import json
from safetensors import safe_open

class AutoLoader:
    def __init__(self, pg, hf_weights_files, device="cpu"{more}):
        self.files, self.more = hf_weights_files, dict({passed})
    def iterate_weights(self):
        keep = self.more.get("local_copyout_filter") or (lambda key: True)
        split = self.more.get("stacked_moe_tensors") or self.more.get("dim0_split_templates") or {{}}
        for file in self.files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    whole = opened.get_tensor(name)
                    if name in split:
                        rows = ((split[name].format(expert_id=i), whole[i].clone()) for i in range(len(whole)))
                    else:
                        rows = ((name, whole),)
                    for key, tensor in rows:
                        if keep(key){condition}:
                            yield key, tensor
    def close(self): pass
    {estimate}
"""


def working(more: tuple[str, ...] = (), loses: str = "", estimate: str = "") -> str:
    """A package with nothing but an AutoLoader that works, with extensions; ``loses``: what it forgets to yield."""
    return _WORKING.format(
        more="".join(f", {name}=None" for name in more),
        passed=", ".join(f"{name}={name}" for name in more),
        condition=f" and {loses!r} not in key" if loses else "",
        estimate=estimate,
    )


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
