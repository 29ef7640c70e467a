"""Export is the plan run backwards: whatever the sharding and fusion, the files come back byte for byte."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from rtp_llm import LoadConfig, ParallelConfig, export_checkpoint, load_model
from rtp_llm.errors import ConfigError, PlanError
from rtp_llm.loader.export.files import completed
from rtp_llm.loader.load import LoadedModel
from rtp_llm.plan.pieces import ParamSpec
from rtp_llm.plan.plan import Target
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

CPU = LoadConfig(device="cpu")


def digests(directory: Path) -> dict[str, str]:
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")])
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_files_come_back_byte_for_byte(tmp_path: Path) -> None:
    """Sharded bfloat16 files, their index and the configuration: equal hashes."""
    source = save_tiny_llama(tmp_path / "source", dtype=torch.bfloat16, shard="20KB")
    out = export_checkpoint(load_model(source, load=CPU), tmp_path / "out")
    assert len(digests(source)) > 5
    assert digests(out) == digests(source)


def export_in_ranks(source: str, out: str) -> None:
    export_checkpoint(load_model(source, load=LoadConfig(device="cpu", timeout_s=30)), out)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_sharded_model_comes_back_whole(tmp_path: Path, ranks: int) -> None:
    """TP 2, and TP 4 with replicated KV heads and a padded vocabulary: rank 0 writes what all ranks hold together."""
    source = save_tiny_llama(tmp_path / "source", shard="20KB", num_attention_heads=4)
    run_ranks(ranks, export_in_ranks, str(source), str(tmp_path / "out"))
    assert digests(tmp_path / "out") == digests(source)


def test_a_rank_alone_cannot_be_exported(tmp_path: Path) -> None:
    """Half of a model is refused, with every tensor that is not whole, and nothing is written."""
    source = save_tiny_llama(tmp_path / "source")
    loaded = load_model(source, parallel=ParallelConfig(2, 0), load=CPU)
    with pytest.raises(PlanError, match="NOT_REVERSIBLE"):
        export_checkpoint(loaded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_lossless_cast_is_undone_and_a_lossy_one_refused(tmp_path: Path) -> None:
    """bfloat16 weights loaded as float32 give their bytes back; float32 weights loaded as bfloat16 cannot, and say so."""
    source = save_tiny_llama(tmp_path / "narrow", dtype=torch.bfloat16)
    wide = load_model(source, load=LoadConfig(device="cpu", dtype="float32"))
    assert digests(export_checkpoint(wide, tmp_path / "out")) == digests(source)
    wider = save_tiny_llama(tmp_path / "wide")
    with pytest.raises(PlanError, match=r"tensor lm_head.weight.*expected float32 or wider, found bfloat16"):
        export_checkpoint(load_model(wider, load=LoadConfig(device="cpu", dtype="bfloat16")), tmp_path / "lost")


@pytest.mark.parametrize("narrow_first", [True, False])
def test_one_of_several_places_is_enough(tmp_path: Path, narrow_first: bool) -> None:
    """A weight that was cast at one place and kept at another is written from the place that kept it, whichever comes first; it is
    refused only where every place has lost something."""
    source = save_tiny_llama(tmp_path / "source")
    loaded = load_model(source, load=CPU)
    delivery = next(d for d in loaded.plan.deliveries if d.tensor.name == "model.norm.weight")
    kept = delivery.targets[0]
    content = loaded.model.get_parameter(kept.param).detach()
    assert not torch.equal(content.bfloat16().float(), content.add_(0.001))
    save_file(load_file(source / "model.safetensors") | {"model.norm.weight": content}, source / "model.safetensors", {"format": "pt"})
    loaded.model.register_parameter("narrow", nn.Parameter(content.bfloat16(), requires_grad=False))

    def with_targets(*targets: Target) -> LoadedModel:
        params = (*loaded.plan.model.params, ParamSpec("narrow", tuple(content.shape), "bfloat16", ()))
        deliveries = tuple(replace(d, targets=targets) if d is delivery else d for d in loaded.plan.deliveries)
        return replace(loaded, plan=replace(loaded.plan, model=replace(loaded.plan.model, params=params), deliveries=deliveries))

    narrow = replace(kept, param="narrow")
    out = export_checkpoint(with_targets(*((narrow, kept) if narrow_first else (kept, narrow))), tmp_path / "out")
    assert digests(out) == digests(source)
    with pytest.raises(PlanError, match=r"narrowed when it was loaded to narrow .*model.norm.weight"):
        export_checkpoint(with_targets(narrow), tmp_path / "lost")


def test_skipped_tensors_and_tied_heads_come_back(tmp_path: Path) -> None:
    """What a named rule skipped (rotary frequencies) is copied; a tied head that is not in the file stays out of it."""
    source = save_tiny_llama(tmp_path / "source", tie_word_embeddings=True)
    file = source / "model.safetensors"
    tensors = load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4)}
    assert "lm_head.weight" not in tensors
    save_file(tensors, file, metadata={"format": "pt", "note": "kept"})
    loaded = load_model(source, load=CPU)
    assert [s.raw for s in loaded.plan.skipped] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert digests(export_checkpoint(loaded, tmp_path / "out")) == digests(source)


def test_torch_files_become_safetensors(tmp_path: Path) -> None:
    """A .bin checkpoint comes back as safetensors under the matching name, with equal tensors."""
    source = save_tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    torch.save(tensors, source / "pytorch_model.bin")
    out = export_checkpoint(load_model(source, load=CPU), tmp_path / "out")
    assert {f.name for f in out.iterdir()} >= {"model.safetensors", "config.json"}
    with safe_open(out / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(tensors)
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_files_that_differ_in_their_suffix_stay_apart(tmp_path: Path) -> None:
    """An index over a.bin, a.pt and a-2.bin: three files come back, none written over another, with every tensor."""
    source = save_tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    weight_map = {name: ("a.bin", "a.pt", "a-2.bin")[i % 3] for i, name in enumerate(sorted(tensors))}
    for file in set(weight_map.values()):
        torch.save({name: tensor for name, tensor in tensors.items() if weight_map[name] == file}, source / file)
    (source / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    out = export_checkpoint(load_model(source, load=CPU), tmp_path / "out")
    names = {"a.bin": "a.safetensors", "a.pt": "a-3.safetensors", "a-2.bin": "a-2.safetensors"}
    for file, exported in names.items():
        found = load_file(out / exported)
        assert set(found) == {name for name in tensors if weight_map[name] == file}
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in found.items())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: names[file] for name, file in weight_map.items()}


def test_one_file_with_an_unusual_name_keeps_its_index(tmp_path: Path) -> None:
    """A checkpoint of one shard comes back with its index, without which transformers does not find the file."""
    source = save_tiny_llama(tmp_path / "source")
    name = "model-00001-of-00001.safetensors"
    (source / "model.safetensors").rename(source / name)
    weight_map = dict.fromkeys(load_file(source / name), name)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert digests(export_checkpoint(load_model(source, load=CPU), tmp_path / "out")) == digests(source)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_an_empty_directory_is_written_to_from_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory and other empty directories, which may be mount points: they stay the directories they are, and what an export
    that was killed has left there is no obstacle."""
    source = save_tiny_llama(tmp_path / "source")
    out = tmp_path / "out"
    (out / ".partial").mkdir(parents=True)
    (out / ".partial" / "model.safetensors").write_text("cut")
    identity = out.stat().st_ino
    monkeypatch.chdir(out)
    export_checkpoint(load_model(source, load=CPU), ".")
    assert digests(out) == digests(source) and out.stat().st_ino == identity
    assert not (out / ".partial").exists() and not list(tmp_path.glob(".*"))


def test_a_directory_is_a_checkpoint_when_all_of_it_is_there(tmp_path: Path) -> None:
    """An export into a directory that is there moves ``config.json`` last: one that ends on the way (here because somebody has put a
    directory where a file belongs) leaves nothing that would be taken for a checkpoint."""
    with pytest.raises(OSError), completed(tmp_path) as partial:
        for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
            (partial / name).write_text("")
        (tmp_path / "tokenizer.json").mkdir()
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "config.json").exists()
    assert not (tmp_path / ".partial").exists()


def test_tensors_outside_the_index_are_left_out(tmp_path: Path) -> None:
    """A stale tensor in a shard is neither loaded nor exported; the rest of its shard is."""
    source = save_tiny_llama(tmp_path / "source", shard="20KB")
    shard = sorted(source.glob("model-*.safetensors"))[0]
    tensors = load_file(shard)
    save_file(tensors | {"model.stale": torch.ones(3)}, shard, metadata={"format": "pt"})
    out = export_checkpoint(load_model(source, load=CPU), tmp_path / "out")
    assert {k: v.tolist() for k, v in load_file(out / shard.name).items()} == {k: v.tolist() for k, v in tensors.items()}


def test_where_it_may_not_write(tmp_path: Path) -> None:
    """A directory that holds something, the source itself, or a disk without room: refused, and nothing is left behind."""
    source = save_tiny_llama(tmp_path / "source")
    loaded = load_model(source, load=CPU)
    full = tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("")
    for out in (full, source):
        with pytest.raises(ConfigError, match="cannot be written to"):
            export_checkpoint(loaded, out)
    os.truncate(source / "model.safetensors", 100)  # an error in the middle: the source of a skipped tensor is gone
    before = sorted(p.name for p in tmp_path.iterdir())
    assert export_checkpoint(loaded, tmp_path / "fine").exists()  # nothing is skipped, so the source is not needed
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "fine"])


def test_links_that_lead_elsewhere_are_not_followed(tmp_path: Path) -> None:
    """A checkpoint's README that is a link to somebody's key does not end in the export; a hub cache's links to blobs do."""
    (tmp_path / "secret").write_text("private")
    hub = tmp_path / "models--a--b"
    source = save_tiny_llama(hub / "snapshots" / "0123")
    blobs = hub / "blobs"
    blobs.mkdir()
    (source / "config.json").rename(blobs / "c0ffee")
    (source / "config.json").symlink_to("../../blobs/c0ffee")
    (source / "README.md").symlink_to(tmp_path / "secret")
    out = export_checkpoint(load_model(source, load=CPU), tmp_path / "out")
    assert (out / "config.json").is_file() and not (out / "README.md").exists()
