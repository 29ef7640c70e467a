"""What a process of ``run_ranks`` runs: ``python -m tests.support.rank_main FILE FUNCTION ARGUMENTS RESULT``."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
from pathlib import Path
from typing import NoReturn


def main(file: str, name: str, arguments: str, result: str) -> None:
    spec = importlib.util.spec_from_file_location("rank_target", file)
    assert spec is not None and spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules["rank_target"] = module
    spec.loader.exec_module(module)
    try:
        value = getattr(module, name)(*pickle.loads(Path(arguments).read_bytes()))
    except SystemExit as end:
        _end(end.code if isinstance(end.code, int) else 1)
    Path(result).write_bytes(pickle.dumps(value))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        _end(0)


def _end(code: int) -> NoReturn:
    """Not by way of destructors: gloo's threads may abort a process that exits while they let go of the last tensors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
