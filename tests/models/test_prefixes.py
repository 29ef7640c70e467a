"""What stands before tensor names is asked of the checkpoint, and never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, export_checkpoint, load_model
from rtp_llm.errors import PlanError
from rtp_llm.models.prefixes import CAUSAL, encoder_prefixes
from tests.models.decoders import configured
from tests.models.reference import make, token_ids

CPU = LoadConfig(device="cpu")


def renamed(folder: Path, body: str, head: str) -> None:
    """Gives the names of a causal model another prefix."""
    path = folder / "model.safetensors"
    tensors = {
        (f"{body}{name.removeprefix('model.')}" if name.startswith("model.") else f"{head}{name}"): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("variant", ["llama", "llama-tied", "phi3"])
@pytest.mark.parametrize(("body", "head"), [("", ""), ("model.language_model.", ""), ("language_model.model.", "language_model.")])
def test_a_prefix_changes_nothing(body: str, head: str, variant: str, tmp_path: Path) -> None:
    """The body saved alone, and in wrappers of transformers 5 and before: the same logits, and an export with the same names."""
    make(*configured(variant), tmp_path / "source")
    with torch.inference_mode():
        wanted = load_model(tmp_path / "source", load=CPU).model(token_ids())
        renamed(tmp_path / "source", body, head)
        loaded = load_model(tmp_path / "source", load=CPU)
        assert torch.equal(loaded.model(token_ids()), wanted)
    out = export_checkpoint(loaded, tmp_path / "out")
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "source" / "model.safetensors").read_bytes()


def test_two_prefixes_are_refused(tmp_path: Path) -> None:
    """Weights under two prefixes are not chosen between: those of the second one are unexpected, all of them."""
    make(*configured("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with pytest.raises(PlanError) as caught:
        load_model(tmp_path, load=CPU)
    assert {problem.code for problem in caught.value.problems} == {"UNEXPECTED_TENSOR"}
    assert {problem.tensor for problem in caught.value.problems} == {n.removeprefix("model.") for n in tensors if n.startswith("model.")}


@pytest.mark.parametrize("strange", ["_orig_mod.", "base_model.", "model.", "language_model."])
def test_prefixes_that_no_family_has_are_refused(strange: str, tmp_path: Path) -> None:
    """Names that some tool has put something before: unexpected as they stand, and missing under the usual prefix."""
    make(*configured("llama-tied"), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    body = "model.model." if strange == "model." else f"{strange}model."
    if strange == "language_model.":
        body = "language_model."
    save_file({f"{body}{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    with pytest.raises(PlanError) as caught:
        load_model(tmp_path, load=CPU)
    missing = [problem.tensor for problem in caught.value.problems if problem.code == "MISSING_TENSOR"]
    assert sorted(str(name) for name in missing) == sorted(tensors)


def test_names_without_their_prefix() -> None:
    """A family sees names as it spells them; what is neither body nor head does not reach it."""
    names = ("language_model.model.layers.0.x", "language_model.lm_head.weight", "vision.layers.0.x", "lm_head.weight")
    assert CAUSAL.stripped(names) == {"layers.0.x", "lm_head.weight"}
    assert CAUSAL.stripped(()) == frozenset()
    bert = encoder_prefixes("bert.", "cls")
    assert bert.stripped(("bert.pooler.dense.weight", "cls.x", "pooler.y")) == {"pooler.dense.weight", "cls.x"}
    assert bert.of(("pooler.dense.weight",)).body == ""
