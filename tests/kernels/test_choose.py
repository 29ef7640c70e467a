"""The choice of back ends is a pure function: every reason against one, choice_message apart, with all offenders at once."""

from __future__ import annotations

import logging

import pytest
import torch

from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.choose import KernelChoice, choice_message, choose_kernels
from rtp_llm.kernels.faults import KernelError, KernelFault
from rtp_llm.kernels.functions import DeviceFacts
from rtp_llm.kernels.needs import GateNeed, KernelNeed, NormNeed, RotaryNeed
from rtp_llm.kernels.symbols import Resolution, Symbol

BF16 = torch.bfloat16
HOPPER = DeviceFacts("cuda", (9, 0), "13.0")
NEEDS: tuple[KernelNeed, ...] = (
    NormNeed("rms_norm", BF16, 4096),
    NormNeed("add_rms_norm", BF16, 4096),
    GateNeed("silu_and_mul", BF16, 14336),
    RotaryNeed("rotate", BF16, 128, 128, False),
)
OPS = [need.op for need in NEEDS]


def backends(choices: tuple[KernelChoice, ...]) -> dict[str, str]:
    return {choice.op: choice.backend for choice in choices}


def resolutions(fault: KernelFault, *names: str) -> dict[Symbol, Resolution]:
    """Everything is there but ``names``."""
    symbols = FLASHINFER.symbols(NEEDS)
    return {s: Resolution(s, fault, f"what was seen of {s.name}") if s.name in names else Resolution(s) for s in symbols}


@pytest.mark.parametrize("setting", ["auto", "flashinfer"])
def test_everything_is_there(setting: str) -> None:
    """A GPU and a sound package: flashinfer does all that it offers."""
    assert backends(choose_kernels(setting, FLASHINFER, NEEDS, {}, HOPPER)) == dict.fromkeys(OPS, "flashinfer")


def test_torch_is_never_argued_with() -> None:
    """Who asks for torch gets torch, whatever there is."""
    choices = choose_kernels("torch", FLASHINFER, NEEDS, {}, HOPPER)
    assert backends(choices) == dict.fromkeys(OPS, "torch") and {c.reason for c in choices} == {"it was asked for"}


@pytest.mark.parametrize(
    ("device", "fault", "said"),
    [
        (DeviceFacts("cpu", (0, 0), "13.0"), "NOT_CUDA", "the device is cpu"),
        (DeviceFacts("cpu", (0, 0), None), "NOT_CUDA", "the device is cpu"),
        (DeviceFacts("cuda", (9, 4), None), "NOT_CUDA", "the device is of ROCm"),
        (DeviceFacts("cuda", (7, 5), "12.9"), "ARCHITECTURE", "compute capability 7.5, from 8.0 on"),
    ],
)
def test_devices(device: DeviceFacts, fault: str, said: str) -> None:
    """No CUDA device, or one that is too old: auto takes torch and says so, and flashinfer is refused once for all operations."""
    choices = choose_kernels("auto", FLASHINFER, NEEDS, {}, device)
    assert {(c.backend, c.fault, c.reason) for c in choices} == {("torch", fault, said)}
    assert choice_message("auto", FLASHINFER, choices)[0] == logging.INFO
    with pytest.raises(KernelError) as caught:
        choose_kernels("flashinfer", FLASHINFER, NEEDS, {}, device)
    (problem,) = caught.value.problems
    assert problem.code == fault and all(op in problem.what for op in OPS) and problem.actual == said and problem.fix


@pytest.mark.parametrize(
    ("need", "fault", "said"),
    [
        (NormNeed("rms_norm", torch.float32, 4096), "DTYPE", "float32, where there is bfloat16 and float16"),
        (NormNeed("rms_norm", BF16, 4092), "SHAPE", "rows of 4092, which is no multiple of 8"),
        (GateNeed("silu_and_mul", BF16, 36), "SHAPE", "rows of 36, which is no multiple of 8"),
        (RotaryNeed("rotate", BF16, 80, 80, False), "SHAPE", "heads of 80 elements, where there is 64, 128, 256"),
        (RotaryNeed("rotate", BF16, 128, 40, True), "SHAPE", "turned elements of 40, which is no multiple of 16"),
        (KernelNeed("fly", BF16), "NOT_OFFERED", "flashinfer has no fly"),
    ],
)
def test_what_the_model_asks_for(need: KernelNeed, fault: str, said: str) -> None:
    """One need beyond a back end's reach gives that operation to torch, and no other; the reason names it."""
    needs = [*(n for n in NEEDS if n.op != need.op), *(n for n in NEEDS if n.op == need.op), need]
    choices = {c.op: c for c in choose_kernels("auto", FLASHINFER, needs, {}, HOPPER)}
    assert [op for op, c in choices.items() if c.backend == "torch"] == [need.op]
    assert choices[need.op].fault == fault and said in choices[need.op].reason
    with pytest.raises(KernelError) as caught:
        choose_kernels("flashinfer", FLASHINFER, needs, {}, HOPPER)
    assert [(p.code, p.actual) for p in caught.value.problems] == [(fault, said)]


@pytest.mark.parametrize(
    ("fault", "level"),
    [
        (KernelFault.NOT_INSTALLED, logging.INFO),
        (KernelFault.IMPORT_FAILED, logging.WARNING),
        (KernelFault.SYMBOL_MISSING, logging.WARNING),
        (KernelFault.SIGNATURE, logging.WARNING),
    ],
)
def test_what_was_found_in_the_package(fault: KernelFault, level: int) -> None:
    """Absent is normal and choice_message at INFO; installed and broken is a warning.  Only what calls the broken name goes to torch."""
    choices = choose_kernels("auto", FLASHINFER, NEEDS, resolutions(fault, "rmsnorm"), HOPPER)
    assert backends(choices) == {**dict.fromkeys(OPS, "flashinfer"), "rms_norm": "torch"}
    found, text = choice_message("auto", FLASHINFER, choices)
    assert found == level and "what was seen of rmsnorm" in text and "\n" not in text
    assert ("pip install" in text) == (level == logging.WARNING), "what to do, where there is something to be done"


def test_what_compiles_counts_as_well() -> None:
    """The functions that describe a module to the compiler and load it are called too, by all that needs the module."""
    choices = choose_kernels("auto", FLASHINFER, NEEDS, resolutions(KernelFault.SYMBOL_MISSING, "gen_norm_module"), HOPPER)
    assert [c.op for c in choices if c.backend == "torch"] == ["rms_norm", "add_rms_norm"]


def test_all_offenders_are_listed() -> None:
    """Asked for by name, a back end that cannot is refused with every reason, each once, and with what to install."""
    found = resolutions(KernelFault.SIGNATURE, "rmsnorm")
    found |= {s: r for s, r in resolutions(KernelFault.SYMBOL_MISSING, "silu_and_mul").items() if r.fault is not None}
    needs = [*NEEDS, RotaryNeed("rotate", BF16, 80, 80, False), NormNeed("rms_norm", torch.float64, 16)]
    with pytest.raises(KernelError) as caught:
        choose_kernels("flashinfer", FLASHINFER, needs, found, DeviceFacts("cuda", (7, 0), "12.9"))
    assert {p.code for p in caught.value.problems} == {"ARCHITECTURE", "SYMBOL_MISSING", "SIGNATURE", "DTYPE", "SHAPE"}
    assert any("flashinfer-python==0.6.6" in (p.fix or "") for p in caught.value.problems)
