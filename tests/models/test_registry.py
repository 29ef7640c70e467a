"""The registry knows each architecture once, and imports a family when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rtp_llm.errors import ConfigError
from rtp_llm.models.family import Family, Implementation
from rtp_llm.models.registry import FAMILIES, find_family, register
from tests.support.paths import ROOT, child_env


@pytest.mark.parametrize(
    ("architecture", "family", "kind"),
    [
        ("LlamaForCausalLM", "llama", "causal"),
        ("MistralForCausalLM", "mistral", "causal"),
        ("Phi3ForCausalLM", "phi3", "causal"),
        ("Qwen2ForCausalLM", "qwen2", "causal"),
        ("Qwen3ForCausalLM", "qwen3", "causal"),
        ("GptOssForCausalLM", "gpt_oss", "causal"),
        ("BertModel", "bert", "encoder"),
        ("BertForMaskedLM", "bert", "encoder"),
        ("BertForPreTraining", "bert", "encoder"),
        ("RobertaModel", "roberta", "encoder"),
        ("RobertaForMaskedLM", "roberta", "encoder"),
        ("XLMRobertaModel", "roberta", "encoder"),
        ("XLMRobertaForMaskedLM", "roberta", "encoder"),
    ],
)
def test_architectures_have_a_family(architecture: str, family: str, kind: str) -> None:
    """A name in ``architectures`` leads to one family."""
    found = find_family([architecture])
    assert (found.name, found.kind) == (family, kind)


@pytest.mark.parametrize("architectures", [["LlamaForSequenceClassification"], [], ["LlamaForCausalLM", "BertModel"], [3]])
def test_others_are_refused_with_those_that_are_known(architectures: list[str]) -> None:
    """No family, no name, two names: the error names the file, what it says, and what could stand there."""
    with pytest.raises(ConfigError, match=r"UNKNOWN_ARCHITECTURE.*config\.json.*BertForMaskedLM.*XLMRobertaModel"):
        find_family(architectures)  # type: ignore[arg-type]


def test_registering_twice_is_an_error() -> None:
    """A second family of the same name, and a second claim on an architecture, are both named."""
    first = Family("one", "causal", ("AForCausalLM",), "somewhere.one")
    second = Family("one", "causal", ("AForCausalLM", "BForCausalLM"), "somewhere.two")
    with pytest.raises(ConfigError) as caught:
        register([first, second])
    assert [problem.what.split()[1] for problem in caught.value.problems] == ["AForCausalLM", "one"]
    assert {problem.actual for problem in caught.value.problems} == {"somewhere.one, somewhere.two"}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_each_family_is_a_folder_of_the_same_shape(family: Family) -> None:
    """A configuration and a short README; the package exports an implementation."""
    folder = ROOT.joinpath(*family.module.split("."))
    assert {"config.py", "README.md"} <= {file.name for file in folder.iterdir()}
    assert len(folder.joinpath("README.md").read_text().splitlines()) <= 12
    assert isinstance(family.load(), Implementation)


def test_families_are_imported_when_asked_for() -> None:
    """The registry alone imports no family; nothing of the product imports transformers."""
    script = (
        "import sys; from rtp_llm.models.registry import FAMILIES; before = set(sys.modules); [f.load() for f in FAMILIES];"
        "print([f.module in before for f in FAMILIES], 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], env=child_env(), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[False] * len(FAMILIES)} False"
