"""Which files and tensors make a checkpoint, and what the catalogue says of the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rtp_llm.checkpoint import CheckpointFault as F
from rtp_llm.checkpoint import read_catalog
from rtp_llm.checkpoint.discover import discover
from rtp_llm.errors import CheckpointError
from tests.attacks.hostile import CONFIG, INDEX, SHARDS, TENSORS, good_sharded, good_single
from tests.support.paths import child_env
from tests.support.sparse import DEEPSEEK_V3_CONFIG, deepseek_v3, llama_3_70b, nbytes, write_sparse_checkpoint, write_sparse_file


def test_index_is_an_allow_list_for_each_tensor(tmp_path: Path) -> None:
    """1,024 stale tensors in a shard of the index are reported once, counted, and not in the catalogue."""
    good_sharded(tmp_path)
    held = {n: t for n, t in TENSORS.items() if json.loads((tmp_path / INDEX).read_text())["weight_map"][n] == SHARDS[1]}
    write_sparse_file(tmp_path / SHARDS[1], held | {f"stale.{i}": ("U8", (1,)) for i in range(1024)})
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert [t.name for t in catalog.tensors] == sorted(TENSORS)
    (note,) = catalog.notes
    assert note.fault is F.OUTSIDE_INDEX and note.file == SHARDS[1] and "1024 tensors" in note.what


def test_absent_shards_are_counted(tmp_path: Path) -> None:
    """Reports name each absent file, how many are named, and how many are there."""
    write_sparse_checkpoint(tmp_path, TENSORS, 4, CONFIG)
    for i in (2, 3):
        (tmp_path / f"model-0000{i}-of-00004.safetensors").unlink()
    problems = read_catalog(tmp_path).problems
    assert [p.file for p in problems] == ["model-00002-of-00004.safetensors", "model-00003-of-00004.safetensors"]
    assert {(p.fault, p.expected, p.actual) for p in problems} == {(F.SHARD_ABSENT, "4 shards", "2 shards")}


def test_shards_without_index(tmp_path: Path) -> None:
    """A complete set of shards with distinct names loads without an index, with a note."""
    good_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    catalog = read_catalog(tmp_path)
    catalog.raise_for_problems()
    assert [t.name for t in catalog.tensors] == sorted(TENSORS)
    assert [n.fault for n in catalog.notes] == [F.NO_INDEX]


@pytest.mark.parametrize(
    ("names", "format", "index", "files"),
    [
        (["model.safetensors", "pytorch_model.bin"], "safetensors", None, ("model.safetensors",)),
        (["model.safetensors", INDEX], "safetensors", INDEX, ()),
        (["consolidated.safetensors.index.json", "consolidated-00001-of-00002.safetensors", INDEX], "safetensors", INDEX, ()),
        (["model.fp16.safetensors.index.json"], "safetensors", "model.fp16.safetensors.index.json", ()),
        (["weights.safetensors"], "safetensors", None, ("weights.safetensors",)),
        (["model.safetensors", "extra.safetensors"], "safetensors", None, ("model.safetensors",)),
        (["a.safetensors", "b.safetensors"], "safetensors", None, ("a.safetensors", "b.safetensors")),
        (
            ["pytorch_model.bin", "optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state_0.pth"],
            "torch",
            None,
            ("pytorch_model.bin",),
        ),
        (["pytorch_model.bin.index.json", "pytorch_model.bin"], "torch", "pytorch_model.bin.index.json", ()),
        (["pytorch_model-00001-of-00001.bin"], "torch", None, ("pytorch_model-00001-of-00001.bin",)),
        (["model.pt"], "torch", None, ("model.pt",)),
        (["adapter_model.safetensors", "pytorch_model.bin"], "torch", None, ("pytorch_model.bin",)),
    ],
)
def test_choice_of_files(names: list[str], format: str, index: str | None, files: tuple[str, ...]) -> None:
    """Index before single file before shards, safetensors before torch; other layouts, adapters and training state never."""
    chosen = discover([*names, "config.json", "tokenizer.json"])
    assert (chosen.format, chosen.index, chosen.files) == (format, index, files)
    assert chosen.problems == ()


@pytest.mark.parametrize(
    ("names", "fault", "words"),
    [
        (["model.gguf"], F.NO_WEIGHTS, "GGUF"),
        (["consolidated.safetensors"], F.NO_WEIGHTS, "vendor's own layout"),
        (["adapter_model.safetensors"], F.NO_WEIGHTS, "LoRA"),
        (["optimizer.pt"], F.NO_WEIGHTS, "1 other files"),
        ([], F.NO_WEIGHTS, "empty directory"),
        (["snapshots", "blobs", "refs"], F.NO_WEIGHTS, "snapshots/<revision>"),
        (["a.safetensors.index.json", "b.safetensors.index.json"], F.AMBIGUOUS_FILES, "a.safetensors.index.json"),
        (["m-00001-of-00001.safetensors", "n-00001-of-00001.safetensors"], F.AMBIGUOUS_FILES, "several sets"),
        (["a.pt", "b.pt"], F.AMBIGUOUS_FILES, "a.pt, b.pt"),
    ],
)
def test_no_choice_of_files(names: list[str], fault: F, words: str) -> None:
    """Where nothing, or too much, could be meant, the message says what is there."""
    with pytest.raises(CheckpointError) as caught:
        discover(names)
    assert caught.value.problems[0].fault is fault
    assert words in str(caught.value)


def test_absent_shards_by_their_numbers(tmp_path: Path) -> None:
    """Without an index the names say how many shards there should be, and which are absent."""
    write_sparse_checkpoint(tmp_path, TENSORS, 3, CONFIG)
    (tmp_path / INDEX).unlink()
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (problem,) = read_catalog(tmp_path).problems
    assert (problem.fault, problem.file, problem.expected, problem.actual) == (
        F.SHARD_ABSENT,
        "model-00002-of-00003.safetensors",
        "3 shards",
        "2 shards",
    )


def test_identity_is_of_content_not_of_place(tmp_path: Path) -> None:
    """Two copies have one identity; another shape, name, file or order of bytes has another."""
    copies = [tmp_path / name for name in ("a", "b")]
    for copy in copies:
        good_sharded(copy)
    first, second = map(read_catalog, copies)
    assert first.identity == second.identity
    good_single(tmp_path / "single")
    reordered = dict(reversed(TENSORS.items()))
    write_sparse_checkpoint(tmp_path / "reordered", reordered, 2, CONFIG)
    write_sparse_checkpoint(tmp_path / "shape", TENSORS | {"model.norm.weight": ("F32", (8, 1))}, 2, CONFIG)
    others = {read_catalog(tmp_path / name).identity for name in ("single", "reordered", "shape")}
    assert len(others | {first.identity}) == 4


def test_catalogue_is_json(tmp_path: Path) -> None:
    """``to_json`` counts tensors and bytes by dtype and survives a round through JSON."""
    good_single(tmp_path)
    data = json.loads(json.dumps(read_catalog(tmp_path).to_json()))
    total = sum(nbytes(*t) for t in TENSORS.values())
    assert (data["tensors"], data["bytes"], data["dtypes"]) == (12, total, {"F32": {"tensors": 12, "bytes": total}})
    assert data["files"][0]["format"] == "safetensors" and data["files"][0]["metadata"] == {"format": "pt"}


def test_deepseek_v3_is_catalogued_in_two_seconds_without_torch(tmp_path: Path) -> None:
    """91,991 tensors in 163 shards, 689 GB by their headers, in under 2 s and without importing torch or numpy.

    Processor time of the one thread that does it, so that the machine's other work does not count.
    """
    tensors = deepseek_v3()
    assert len(tensors) == 91_991
    write_sparse_checkpoint(tmp_path, tensors, 163, DEEPSEEK_V3_CONFIG)
    script = (
        "import sys, time; from rtp_llm.checkpoint import read_catalog; began = time.process_time(); "
        "c = read_catalog(sys.argv[1]); c.raise_for_problems(); "
        "print(time.process_time() - began, len(c.tensors), c.total_bytes, len(c.files), bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, *rest = done.stdout.split()
    assert rest == ["91991", str(sum(nbytes(*t) for t in tensors.values())), "163", "False"]
    assert float(seconds) < 2


def test_llama_3_70b_has_its_published_size() -> None:
    """The generator's bytes are those of the published checkpoint (total_size 141,107,412,992)."""
    assert sum(nbytes(*t) for t in llama_3_70b().values()) == 141_107_412_992
    assert len(llama_3_70b()) == 723
