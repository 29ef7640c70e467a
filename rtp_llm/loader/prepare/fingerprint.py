"""The fingerprint of a checkpoint's content.  A base model and its fine-tuned versions have equal headers; ranks that read one
each would load without an error and generate nonsense."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import Catalog, TensorInfo
from rtp_llm.checkpoint.files import open_regular, os_problem, read_exactly
from rtp_llm.errors import CheckpointError

#: Sampled tensors of a checkpoint, at least one in each file: enough to show fine-tuning of some kinds of layers, and read within
#: a second over a network (DeepSeek-V3 has 163 files).
_SAMPLES = 64

#: Bytes of a tensor that are read, from its middle: one page of a file system, which costs as much as one byte.
_SAMPLE_BYTES = 4096


def content_lines(catalog: Catalog, raw_config: Mapping[str, Any]) -> Iterator[str]:
    """A line for ``config.json`` and one for each file of weights, equal for equal checkpoints.

    Samples: two checkpoints may differ elsewhere.

    Raises:
        CheckpointError: a file that can no longer be read.
    """
    yield f"config.json sha256 {hashlib.sha256(json.dumps(raw_config, sort_keys=True).encode()).hexdigest()}"
    by_file: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in catalog.tensors:
        by_file[tensor.file].append(tensor)
    for name, tensors in sorted(by_file.items()):
        yield f"content of {name}: sha256 of samples {_sampled(Path(catalog.directory) / name, name, tensors, len(by_file))}"


def _sampled(path: Path, name: str, tensors: Sequence[TensorInfo], files: int) -> str:
    count = min(len(tensors), max(1, _SAMPLES // files))
    digest = hashlib.sha256()
    with open_regular(path, name) as (fd, _):
        for i in range(count):
            tensor = tensors[(2 * i + 1) * len(tensors) // (2 * count)]
            middle = tensor.start + max(0, (tensor.nbytes - _SAMPLE_BYTES) // 2)
            try:
                digest.update(read_exactly(fd, min(tensor.nbytes, _SAMPLE_BYTES), middle))
            except OSError as error:
                raise CheckpointError(os_problem(error, path, name)) from error
    return digest.hexdigest()
