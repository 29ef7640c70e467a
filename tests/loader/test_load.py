"""load_model on real files: every rank holds its part and no more, bounded memory, a true report, refusals before reading."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rtp_llm import LoadConfig, ParallelConfig, build_plan, load_model
from rtp_llm.errors import ConfigError, ParallelError, PlanError, TransportError
from rtp_llm.loader.fill import fill as filling
from rtp_llm.loader.fill.verify import verify
from rtp_llm.quantization.faults import QuantizationError
from tests.support.paths import ROOT, child_env
from tests.support.tiny import save_tiny_llama

CPU = LoadConfig(device="cpu")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("load") / "llama", shard="20KB")


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_parameter_is_what_safetensors_reads(sharded: Path) -> None:
    """Fused parameters are the checkpoint's tensors under one another, bit for bit, by safetensors' own reader."""
    loaded = load_model(sharded, load=CPU)
    raw = {k: v for file in sharded.glob("*.safetensors") for k, v in load_file(file).items()}
    params = dict(loaded.model.named_parameters())
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn."
        fused = torch.cat([raw[f"{prefix}{k}_proj.weight"] for k in "qkv"])
        assert any(p.shape == fused.shape and torch.equal(p, fused) for name, p in params.items() if f"layers.{layer}." in name)
    assert loaded.report.bytes_read == sum(t.nbytes for t in raw.values()) == loaded.plan.bytes_resident
    assert loaded.report.bytes_copied == 0  # straight into place
    assert all(not p.is_meta and not p.requires_grad for p in params.values())


@pytest.mark.parametrize("buffer_mib", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_accepts_a_right_load_at_every_rank(sharded: Path, dtype: str, buffer_mib: int) -> None:
    """With and without a cast, at TP 1, 2, 3 and 6 (KV heads replicated), each rank's weights equal a second reader's."""
    for tp in (1, 2, 6):
        for rank in range(tp):
            settings = LoadConfig(device="cpu", dtype=dtype, verify=True, buffer_mib=buffer_mib)
            loaded = load_model(sharded, parallel=ParallelConfig(tp, rank), load=settings)
            assert loaded.report.verified and loaded.report.verified >= len(loaded.plan.model.params)


@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_verify_of_torch_files(tmp_path: Path, key: str | None) -> None:
    """A state dict as it is, and inside of what a training script saves beside it."""
    directory = save_tiny_llama(tmp_path / "bin")
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(tensors if key is None else {key: tensors, "epoch": 3}, directory / "pytorch_model.bin")
    loaded = load_model(directory, load=LoadConfig(device="cpu", verify=True))
    assert loaded.report.verified == len(tensors)


def test_verify_finds_one_changed_bit(sharded: Path) -> None:
    """The check is of values: one flipped bit in one weight is found and named."""
    loaded = load_model(sharded, load=CPU)
    weight = loaded.model.get_parameter("norm.weight")
    weight.data.view(torch.int32)[3] ^= 1
    with pytest.raises(TransportError, match=r"VERIFY_FAILED: norm.weight.*tensor model.norm.weight"):
        verify(loaded.model, loaded.plan)


def test_a_load_within_inference_mode(sharded: Path) -> None:
    """A caller that has switched autograd off may load as well, casts included."""
    with torch.inference_mode():
        loaded = load_model(sharded, load=LoadConfig(device="cpu", dtype="bfloat16"))
        assert loaded.model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_ranks_share_the_bytes(sharded: Path) -> None:
    """At TP 2 the ranks together read the checkpoint once, replicated norms and nothing else twice."""
    plans = [build_plan(sharded, ParallelConfig(2, rank), CPU) for rank in range(2)]
    whole = build_plan(sharded, load=CPU)
    norms = sum(d.nbytes for d in whole.deliveries if "norm" in d.slot)
    assert sum(p.bytes_read for p in plans) == whole.bytes_read + norms
    assert plans[0].digest == plans[1].digest != whole.digest


def test_one_rank_alone_is_loaded_and_cannot_run(sharded: Path) -> None:
    """A rank without its group has its weights, and a forward pass says what to start."""
    loaded = load_model(sharded, parallel=ParallelConfig(2, 1), load=CPU)
    with pytest.raises(ParallelError, match="torchrun"):
        loaded.model(torch.tensor([[1, 2, 3]]))


def test_indivisible_sizes_are_refused_with_those_that_work(sharded: Path) -> None:
    """6 heads over 4 ranks: refused at plan time, with the sizes that fit."""
    with pytest.raises(PlanError, match=r"INDIVISIBLE.*\[1, 2, 6"):
        build_plan(sharded, ParallelConfig(4, 0), CPU)


@pytest.mark.parametrize(
    "where", [{"quantization_config": {"quant_method": "fp8"}}, {"text_config": {"quantization_config": {"quant_method": "gptq"}}}]
)
def test_quantised_checkpoints_are_refused(tmp_path: Path, where: dict[str, object]) -> None:
    """Whatever the tensors look like, a checkpoint that says it is quantised is never loaded as if it were not."""
    directory = save_tiny_llama(tmp_path / "quantised")
    change_config(directory, **where)
    with pytest.raises(QuantizationError, match="quantised"):
        load_model(directory, load=CPU)
    change_config(directory, quantization_config=None, text_config={})
    load_model(directory, load=CPU)
    (directory / "hf_quant_config.json").write_text("{}")
    with pytest.raises(QuantizationError, match="hf_quant_config.json"):
        load_model(directory, load=CPU)


def test_missing_and_unexpected_tensors_are_named_as_the_files_name_them(tmp_path: Path) -> None:
    """A lost tensor, a stranger, and a layer too many: all named at once, before anything is allocated."""
    directory = save_tiny_llama(tmp_path / "broken")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(96, 48)
    tensors["model.stranger"] = torch.zeros(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PlanError) as caught:
        load_model(directory, load=CPU)
    assert [(p.code, p.tensor) for p in caught.value.problems] == [
        ("MISSING_TENSOR", "model.layers.1.mlp.up_proj.weight"),
        ("UNEXPECTED_TENSOR", "model.layers.2.mlp.up_proj.weight"),
        ("UNEXPECTED_TENSOR", "model.stranger"),
    ]


def test_a_load_that_does_not_fit_is_refused_before_it_allocates(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preflight compares the predicted peak with free memory; here the machine is said to have 1,000 bytes."""
    monkeypatch.setattr("rtp_llm.loader.budget.preflight.free_bytes", lambda device: 1000)
    monkeypatch.setattr(filling, "allocate", lambda *args: pytest.fail("allocated"))
    with pytest.raises(PlanError, match=r"OUT_OF_MEMORY.*expected \d+ bytes.*found 1000 bytes free"):
        load_model(sharded, load=CPU)


def test_dtype_auto(tmp_path: Path) -> None:
    """auto is config.json's dtype (either spelling), else what most bytes are; a dtype no parameter can have is refused."""
    directory = save_tiny_llama(tmp_path / "dtype", dtype=torch.bfloat16)
    path = directory / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("dtype", "torch_dtype")}
    for stated, expected in (({}, "bfloat16"), ({"torch_dtype": "float16"}, "float16"), ({"dtype": "torch.float32"}, "float32")):
        path.write_text(json.dumps(config | stated))
        assert build_plan(directory, load=CPU).model.dtype == expected
    path.write_text(json.dumps(config | {"dtype": "int7"}))
    with pytest.raises(ConfigError, match="int7"):
        build_plan(directory, load=CPU)


def test_report(sharded: Path) -> None:
    """The stable fields of the report are there, and its numbers fit each other and the plan."""
    report = load_model(sharded, load=CPU).report.to_json()
    json.dumps(report)
    plan_fields = "digest architecture tp_size tp_rank ep_size ep_rank parameters bytes_resident bytes_read predicted_peak_bytes"
    load_fields = "load_method requested_mode effective_mode degraded_reason bytes_copied seconds gb_per_s measured_peak_bytes"
    assert set(f"{plan_fields} {load_fields} files missing unexpected skipped slow_path_weights phases".split()) <= report.keys()
    assert report["load_method"] == report["effective_mode"] == "scratch" and report["requested_mode"] == "auto"
    assert sum(f["bytes_read"] for f in report["files"]) == report["bytes_read"] == report["bytes_resident"]
    assert abs(sum(report["phases"].values()) - report["seconds"]) < 0.01
    assert report["missing"] == report["unexpected"] == []


PEAK = """
import sys, torch
from rtp_llm import LoadConfig, load_model
loaded = load_model(sys.argv[1], load=LoadConfig(device="cpu", dtype=sys.argv[2]))
report = loaded.report
print(report.plan.bytes_resident, report.budget.peak, report.measured_peak_bytes)
"""


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_the_weights_and_the_buffers(smollm2: Path, dtype: str) -> None:
    """A 269 MB checkpoint, as it stands and cast while it is placed: the measured peak stays within the prediction and a
    little for the interpreter (threads, descriptors, Python objects), far from a second copy of the weights."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(smollm2), dtype], cwd=ROOT, env=child_env(), capture_output=True, text=True, check=True
    )
    resident, predicted, measured = map(int, done.stdout.split())
    assert resident <= measured + (1 << 20)
    assert measured <= predicted + (24 << 20)
