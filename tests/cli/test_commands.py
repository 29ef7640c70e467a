"""Every command on a small real checkpoint, in this process: documents, texts, exit codes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rtp_llm.cli import main
from tests.support.paths import ROOT
from tests.support.tiny import save_tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), shard="40KB")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command; returns its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return call


def field_names(value: object) -> set[str]:
    """All keys of a document, at any depth, but for those that are names of things (dtypes, phases, weights, metadata)."""
    if isinstance(value, dict):
        inner = {k for name, v in value.items() if name not in ("dtypes", "phases", "metadata", "layout") for k in field_names(v)}
        return {*value, *inner}
    return {k for v in value for k in field_names(v)} if isinstance(value, list) else set()


def test_inspect(tiny: Path, run: Any) -> None:
    """Counts and bytes are those of the files; text and JSON agree; a sound checkpoint exits with 0."""
    code, out, err = run("inspect", tiny, "--json", "--tensors")
    document = json.loads(out)
    stored = {name: t for file in sorted(tiny.glob("*.safetensors")) for name, t in load_file(file).items()}
    assert (code, err, document["problems"], document["notes"]) == (0, "", [], [])
    assert document["tensors"] == len(stored) and document["bytes"] == sum(t.nbytes for t in stored.values())
    assert document["dtypes"] == {"F32": {"tensors": len(stored), "bytes": document["bytes"]}}
    assert document["architectures"] == ["LlamaForCausalLM"]
    assert {t["name"]: tuple(t["shape"]) for t in document["tensor_list"]} == {name: tuple(t.shape) for name, t in stored.items()}
    assert sum(f["tensors"] for f in document["files"]) == len(stored)
    code, out, _ = run("inspect", tiny, "--tensors")
    assert code == 0 and all(name in out for name in stored) and out.endswith("no problems\n")


def test_inspect_lists_all_problems_and_exits_with_1(tiny: Path, run: Any, tmp_path: Path) -> None:
    """Weights and configuration are looked at together."""
    (tmp_path / "model.safetensors").write_bytes(min(tiny.glob("*.safetensors")).read_bytes()[:-5])
    (tmp_path / "config.json").write_text("{}")
    code, out, _ = run("inspect", tmp_path, "--json")
    problems = json.loads(out)["problems"]
    assert code == 1 and len(problems) == 2 and {p["file"] for p in problems} == {"model.safetensors", "config.json"}
    code, out, _ = run("inspect", tmp_path)
    assert code == 1 and out.count("problem: ") == 2 and out.endswith("2 problems\n")


def test_plan(tiny: Path, run: Any) -> None:
    """The documented fields are there, a rank reads its share, and all ranks have one digest."""
    documents = []
    for rank in (0, 1):
        code, out, err = run("plan", tiny, "--tp_size", 2, "--rank", rank, "--json")
        assert (code, err) == (0, "")
        documents.append(json.loads(out))
    wanted = "digest architecture tp_size tp_rank ep_size ep_rank parameters bytes_resident bytes_read predicted_peak_bytes files"
    assert set(f"{wanted} transports missing unexpected skipped".split()) <= set(documents[0])
    by_transport = documents[0]["transports"]
    assert set(by_transport) == {"scratch", "fastsafetensors"}
    assert by_transport["scratch"]["predicted_peak_bytes"] == documents[0]["predicted_peak_bytes"]
    assert [d["tp_rank"] for d in documents] == [0, 1] and documents[0]["digest"] == documents[1]["digest"]
    whole = json.loads(run("plan", tiny, "--json")[1])
    assert documents[0]["bytes_read"] < whole["bytes_read"] < sum(d["bytes_read"] for d in documents) * 1.5
    code, out, _ = run("plan", tiny, "--tp_size", 2, "--rank", 1)
    assert code == 0 and "1 of 2" in out and documents[1]["digest"] in out and "peak memory, fastsafetensors" in out


def test_plan_of_a_checkpoint_that_does_not_fit_its_model(tiny: Path, run: Any, tmp_path: Path) -> None:
    """Missing and unexpected tensors are reported, and the exit code is 1; a load is refused with 2."""
    tensors = {name: t for file in sorted(tiny.glob("*.safetensors")) for name, t in load_file(file).items()}
    tensors["model.layers.0.extra[bold].weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny / "config.json").read_bytes())
    code, out, _ = run("plan", tmp_path, "--json")
    document = json.loads(out)
    assert code == 1 and document["unexpected"] == ["model.layers.0.extra[bold].weight"]
    assert document["missing"] and document["problems"]
    code, out, _ = run("plan", tmp_path)
    assert code == 1 and "unexpected: model.layers.0.extra[bold].weight" in out
    code, out, err = run("load", tmp_path)
    assert (code, out) == (2, "") and "extra[bold]" in err and "Traceback" not in err


@pytest.mark.parametrize(("layers", "shown"), [(4, 18), (14, 100)])
def test_plan_lists_up_to_a_hundred_of_a_kind(tiny: Path, run: Any, tmp_path: Path, layers: int, shown: int) -> None:
    """Nine tensors are missing for each layer that the files do not have: each has a line, and so has its problem; of more than a hundred
    the rest is counted."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, out, _ = run("plan", tmp_path)
    lacking = 9 * (layers - 2)
    for kind in ("missing", "problem"):
        lines = [line for line in out.splitlines() if line.startswith(f"{kind}: ")]
        rest = [f"{kind}: ... and {lacking - shown} more (--json lists all)"] if lacking > shown else []
        assert (code, len(lines), lines[shown:]) == (1, shown + len(rest), rest)


def test_load(tiny: Path, run: Any) -> None:
    """The documented fields are there, every planned byte was read, and stderr tells the settings and their sources."""
    code, out, err = run("load", tiny, "--verify", "--device", "cpu", "--json")
    report = json.loads(out)
    wanted = "load_method requested_mode effective_mode degraded_reason bytes_copied seconds gb_per_s measured_peak_bytes"
    assert code == 0 and set(f"{wanted} slow_path_weights phases".split()) <= set(report)
    assert report["bytes_read"] == json.loads(run("plan", tiny, "--json")[1])["bytes_read"] > 0
    assert (report["load_method"], report["requested_mode"], report["effective_mode"]) == ("scratch", "auto", "scratch")
    assert report["verified"] > 0
    assert "settings: " in err and "device=cpu (flag --device)" in err and "verify=1 (flag --verify)" in err
    code, out, _ = run("load", tiny, "--device", "cpu")
    assert code == 0 and re.search(r"^read +\S+ kB in \d+\.\d\d s", out, re.MULTILINE)


def test_load_of_one_rank_alone(tiny: Path, run: Any) -> None:
    """The weights of a rank can be loaded and checked without the others."""
    code, out, _ = run("load", tiny, "--tp_size", 2, "--rank", 1, "--verify", "--device", "cpu", "--json")
    assert code == 0 and (json.loads(out)["tp_rank"], json.loads(out)["tp_size"]) == (1, 2)


@pytest.mark.parametrize("stated", ["float32", "bfloat16"])
def test_export_gives_the_same_bytes_back(tiny: Path, run: Any, tmp_path: Path, stated: str) -> None:
    """Also where config.json states a narrower dtype than the file has: export picks one that loses nothing."""
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": stated}))
    code, out, _ = run("export", source, tmp_path / "out", "--json")
    assert code == 0
    for file in source.glob("*.safetensors"):
        assert load_file(file).keys() == load_file(tmp_path / "out" / file.name).keys()
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert {f["name"]: f["bytes"] for f in json.loads(out)["files"]} == {f.name: f.stat().st_size for f in (tmp_path / "out").iterdir()}
    code, out, err = run("export", source, tmp_path / "out")
    assert (code, out) == (2, "") and str(tmp_path / "out") in err


def test_models(run: Any) -> None:
    """Every family with its architectures and features, in both forms."""
    code, out, _ = run("models", "--json")
    families = {f["name"]: f for f in json.loads(out)["families"]}
    assert code == 0 and {"llama", "mistral", "qwen2", "qwen3", "bert", "roberta"} <= set(families)
    assert families["llama"]["architectures"] == ["LlamaForCausalLM"] and families["bert"]["kind"] == "encoder"
    code, out, _ = run("models")
    assert code == 0 and all(f["architectures"][0] in out for f in families.values())


def test_settings(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that hold here and where they come from; a bad variable is refused and named."""
    monkeypatch.setenv("RTP_LLM_DTYPE", "float32")
    code, out, _ = run("settings", "--json")
    found = {s["name"]: s for s in json.loads(out)["settings"]}
    assert code == 0 and (found["dtype"]["value"], found["dtype"]["source"]) == ("float32", "environment variable RTP_LLM_DTYPE")
    assert found["load_method"]["environment_variable"] == "LOAD_METHOD"
    monkeypatch.setenv("LOAD_METHOD", "warp")
    code, out, err = run("settings")
    assert (code, out) == (2, "") and "LOAD_METHOD" in err and "'warp'" in err and "auto | fastsafetensors | scratch" in err


def test_doctor(tiny: Path, run: Any) -> None:
    """Versions, tiers and, for a directory, file system and page cache; nothing is missing here."""
    import torch

    code, out, _ = run("doctor", tiny, "--json")
    document = json.loads(out)
    assert (code, document["problems"]) == (0, [])
    assert document["torch"]["version"] == torch.__version__
    tiers = {t["name"]: t for t in document["tiers"]}
    assert tiers["scratch"]["usable"] and tiers["fastsafetensors"]["usable"] and tiers["fastsafetensors"]["reason"].startswith("bounded: ")
    assert {f["name"] for f in document["directory"]["files"]} == {f.name for f in tiny.iterdir()}
    assert all(0 <= f["cached_bytes"] <= f["bytes"] for f in document["directory"]["files"])
    code, out, _ = run("doctor")
    assert code == 0 and document["python"] in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "a", "b"],
        ["nonsense"],
        ["plan", "DIR", "--tp_size", "0"],
        ["plan", "DIR", "--tp_size", "2", "--rank", "2"],
        ["plan", "DIR", "--tp_size", "5"],
        ["plan", "DIR", "--ep_size", "2"],
        ["plan", "DIR", "--dtype", "int4"],
        ["load", "DIR", "--load_method", "fast"],
        ["load", "DIR", "--quantization", "fp8"],
        ["load", "DIR", "--device", "gpu"],
        ["load", "DIR", "--device", "cuda:77"],
        ["load", "/nowhere"],
        ["load", "DIR/config.json"],
        ["generate", "DIR"],
        ["generate", "DIR", "--prompt", "x"],
        ["generate", "DIR", "--prompt", "x", "--max_new_tokens", "0"],
        ["embed", "DIR", "--text", "x"],
        ["embed", "DIR"],
        ["export", "DIR"],
        ["export", "DIR", "/proc/nowhere"],
        ["doctor", "/nowhere"],
    ],
    ids=" ".join,
)
def test_mistakes_are_told_in_both_forms(arguments: list[str], tiny: Path, run: Any) -> None:
    """Exit code 2, a message on stderr without a traceback, stdout empty or, with ``--json``, one error document."""
    given = [argument.replace("DIR", str(tiny)) for argument in arguments]
    code, out, err = run(*given)
    assert (code, out) == (2, "") and err.strip() and "Traceback" not in err and "internal error" not in err
    code, out, err = run(*given, "--json")
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 2 and error["message"] and err.strip()


@pytest.mark.parametrize(
    ("arguments", "json_asked", "debug_asked"),
    [
        (["generate", "/nowhere", "--prompt", "--json", "--prompt", "--debug"], False, False),
        (["embed", "/nowhere", "--text", "a", "--debug", "--text", "--json"], False, True),
        (["generate", "/nowhere", "--prompt=--json", "--json"], True, False),
        (["load", "--debug", "--", "/nowhere", "--json"], False, True),
        (["load", "/nowhere", "--bogus", "--json", "--debug"], True, True),
        (["load", "/nowhere", "--verify=3", "--bogus=--debug", "--json"], True, False),
        (["load", "/nowhere", "--json", "--tp_size"], True, False),
        (["nonsense", "--json", "--debug"], True, True),
        (["--json", "load", "/nowhere"], True, False),
        (["--json"], True, False),
        (["--", "load", "/nowhere", "--json"], True, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_parser_says_what_is_a_flag(arguments: list[str], json_asked: bool, debug_asked: bool, run: Any) -> None:
    """``--json`` and ``--debug`` hold where they are flags, in front of a mistake and behind it; as values they are values."""
    code, out, err = run(*arguments)
    assert code == 2 and ("Traceback" in err) == debug_asked
    assert (json.loads(out)["error"]["exit_code"] == 2) if json_asked else out == ""


def test_documentation_names_every_field(tiny: Path, run: Any, tmp_path: Path) -> None:
    """``docs/json.md`` is complete."""
    page = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs" / "json.md").read_text()))
    calls = [
        ("inspect", tiny, "--tensors"),
        ("inspect", tmp_path),
        ("plan", tiny),
        ("load", tiny),
        ("export", tiny, tmp_path / "out"),
        ("models",),
        ("doctor", tiny),
        ("settings",),
    ]
    for call in calls:
        assert field_names(json.loads(run(*call, "--json")[1])) <= page
    error = json.loads(run("inspect", "--json")[1])["error"]
    assert all(f'"{name}"' in (ROOT / "docs" / "json.md").read_text() for name in error)


def test_logging_of_a_calling_program_is_left_alone(run: Any) -> None:
    """``main`` may be called from Python: afterwards the package logs as the program has it."""
    import logging

    logger = logging.getLogger("rtp_llm")
    before = (list(logger.handlers), logger.level, logger.propagate)
    run("settings")
    assert (list(logger.handlers), logger.level, logger.propagate) == before
