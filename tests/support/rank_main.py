"""What a process of ``run_ranks`` runs: ``python -m tests.support.rank_main FILE FUNCTION ARGUMENTS RESULT``."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import NoReturn

from tests.support.fork_server import TARGET, import_file


def main(file: str, name: str, arguments: str, result: str) -> None:
    module = sys.modules.get(TARGET) or import_file(file)
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
