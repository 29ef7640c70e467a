"""What layers declare, what is bound to them, and that they keep to what operations may do with their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from rtp_llm.cli.app import main
from rtp_llm.config import LoadConfig
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.bind import bind
from rtp_llm.kernels.faults import KernelError
from rtp_llm.kernels.interface import KernelUser, kernel_needs
from rtp_llm.kernels.needs import GateNeed, NormNeed
from rtp_llm.kernels.torch_kernels import TORCH, RotaryTables, TorchKernels
from rtp_llm.loader import load_model
from rtp_llm.transport.interface import NoProgress
from tests.support.plans import prepared
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

OPS = {"rms_norm", "add_rms_norm", "silu_and_mul", "rotate"}
ATTENTION = {"attention.prefill", "attention.decode"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def meta(directory: Path, **parallel: int) -> nn.Module:
    return prepared(directory, **parallel).model


class Recording(TorchKernels):
    """Torch's operations, which note what they are called with, and leave NaN in what they consume."""

    def __init__(self) -> None:
        self.called: set[tuple[str, torch.dtype, int]] = set()

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.called.add(("rms_norm", x.dtype, x.shape[-1]))
        return TORCH.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        self.called.add(("add_rms_norm", x.dtype, x.shape[-1]))
        normed, total = TORCH.add_rms_norm(x, residual, weight, eps)
        x.fill_(torch.nan)
        residual.fill_(torch.nan)
        return normed, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self.called.add(("silu_and_mul", gate_up.dtype, gate_up.shape[-1] // 2))
        return TORCH.silu_and_mul(gate_up)

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """Another form than torch's, which torch's rotation would not survive."""
        return torch.cat((cos, sin), dim=-1), torch.full((len(cos),), torch.nan)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, tables: RotaryTables, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        self.called.add(("rotate", q.dtype, q.shape[-1]))
        cos, sin = tables[0].chunk(2, dim=-1)
        return TORCH.rotate(q, k, (cos, sin), interleaved)


def test_a_model_says_all_that_it_calls_and_owns_what_is_consumed(llama: Path) -> None:
    """What was declared on the meta device is what a pass calls, dtype and sizes included; and since ``add_rms_norm`` may write
    over its arguments, nobody looks at them again: logits stay the same, bit for bit."""
    needs = [need for need in kernel_needs(meta(llama)) if need.op in OPS]
    declared = {(n.op, n.dtype, n.head_dim if n.op == "rotate" else n.size) for n in needs}  # type: ignore[attr-defined]
    model = load_model(llama, device="cpu").model
    ids = torch.arange(10)[None]
    before = model(ids)
    recording = Recording()
    bind(model, dict.fromkeys(OPS, recording))
    after = model(ids)
    assert torch.equal(before, after)
    assert recording.called == declared and {op for op, _, _ in declared} == OPS


def test_needs_are_the_ranks_own(llama: Path) -> None:
    """Two ranks halve the gate; each need is there once, however many layers have it."""
    needs = kernel_needs(meta(llama, tp_size=2, tp_rank=1))
    assert GateNeed("silu_and_mul", torch.float32, 48) in needs and NormNeed("rms_norm", torch.float32, 48) in needs
    assert len(needs) == len(set(needs)) == len(OPS | ATTENTION)


def test_another_activation_needs_no_gate(tmp_path: Path) -> None:
    """There is no kernel for it, and none is asked for."""
    needs = kernel_needs(meta(save_tiny_llama(tmp_path, hidden_act="gelu_pytorch_tanh")))
    assert "silu_and_mul" not in {need.op for need in needs}


def test_every_module_is_bound_and_others_stay(llama: Path) -> None:
    """One back end for an operation of a model; another model keeps its own."""
    first, second = meta(llama), meta(llama)
    bind(first, {"rms_norm": Recording()})
    assert all(m.kernels is not TORCH for m in first.modules() if isinstance(m, KernelUser))
    assert all(m.kernels is TORCH for m in second.modules() if isinstance(m, KernelUser))


class Never(NoProgress):
    """Fails where bytes begin to move."""

    def start(self, total_bytes: int) -> None:
        raise AssertionError("weights were about to be read")


@contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(KernelError) as caught:
        yield
    codes = {problem.code for problem in caught.value.problems}
    assert codes >= {"NOT_CUDA", "DTYPE", "SHAPE"} and all(problem.fix for problem in caught.value.problems)


def test_what_was_asked_for_and_cannot_be_is_refused_before_a_weight_is_read(llama: Path) -> None:
    """By name, on a CPU, in float32, with heads of eight: all of it is said at once."""
    with refused():
        load_model(llama, device="cpu", load=LoadConfig(kernels="flashinfer"), progress=Never())


def test_the_report_says_who_does_what(llama: Path) -> None:
    """One entry for each operation that the model calls."""
    kernels = load_model(llama, device="cpu").report.to_json()["kernels"]
    assert {(o["op"], o["backend"], o["fault"]) for o in kernels["operations"]} == {(op, "torch", "NOT_CUDA") for op in OPS | ATTENTION}
    assert kernels["setting"] == "auto" and kernels["compiled"] is None


def test_commands(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``load`` and ``warmup`` say who does what; by name they are refused, with exit code 2 and without a traceback."""
    for command in ("load", "warmup"):
        assert main([command, str(llama), "--device", "cpu"]) == 0
        assert "torch for" in capsys.readouterr().out
        assert main([command, str(llama), "--device", "cpu", "--kernels", "flashinfer"]) == 2
        said = capsys.readouterr().err
        assert "NOT_CUDA" in said and "Traceback" not in said


def test_doctor_lists_every_operation(capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each, with why it is not to be had here."""
    main(["doctor"])
    shown = capsys.readouterr().out
    assert all(op in shown for op in FLASHINFER.functions) and "the device is cpu" in shown and "nvcc" in shown


def _load_as(directory: str, settings: list[str]) -> str:
    import os

    setting = settings[int(os.environ["RANK"])]
    try:
        load_model(directory, device="cpu", load=LoadConfig(kernels=setting, timeout_s=30))
    except ValueError as error:
        return str(error)
    return "loaded"


def test_ranks_agree_on_the_choice(llama: Path) -> None:
    """A rank that chooses otherwise is refused by all, with the operation.  (That ranks which choose alike load, all other tests of
    ranks show.)"""
    first, second = (result.value for result in run_ranks(2, _load_as, str(llama), ["auto", "torch"]))
    assert first == second and "kernels: add_rms_norm by torch (NOT_CUDA)" in first
