"""What has to be compiled is compiled once, by the right compiler, and never at the first request; by flashinfer's own means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.choose import choose_kernels
from rtp_llm.kernels.compile import Compilation, Compiled, CompileError, check_tools, cuda_major
from rtp_llm.kernels.faults import KernelError
from rtp_llm.kernels.functions import DeviceFacts, JitModule
from rtp_llm.layers.norm import RMSNorm
from rtp_llm.loader.kernels import KernelPlan, KernelSetup, plan_kernels
from tests.kernels.declared import NEEDS
from tests.kernels.toolkit import Toolkit
from tests.support.plans import prepared
from tests.support.ranks import run_ranks
from tests.support.tiny import save_tiny_llama

HOPPER = DeviceFacts("cuda", (9, 0), "13.0")


def modules() -> tuple[JitModule, ...]:
    """Norms and rotation; the gate's module would be looked into when it is loaded, and the toolkit's has nothing in it."""
    needs = [need for need in NEEDS if need.op in ("rms_norm", "add_rms_norm", "rotate")]
    return tuple(dict.fromkeys(module for need in needs for module in FLASHINFER.functions[need.op].modules(need)))


def compiled() -> Compiled:
    check_tools(modules(), "13.0")
    return Compilation(modules(), "13.0").result(60, print, lambda: None)


def refused() -> CompileError:
    try:
        compiled()
    except CompileError as error:
        return error
    raise AssertionError("it was compiled")


def _one_after_another(folder: str) -> None:
    toolkit = Toolkit(Path(folder))
    toolkit.install("12.9")
    error = refused()
    assert error.unsupported.fault.name == "OTHER_CUDA" and "CUDA 13.0" in error.unsupported.detail and error.failed == modules()

    toolkit.install("13.0")
    before = toolkit.compiled
    made = compiled()
    assert made.modules == made.fresh == ("norm", "rope"), "what another CUDA has left is no use"
    files = toolkit.compiled - before
    libraries = [Path(made.directory) / name / f"{name}.so" for name in made.modules]
    assert [cuda_major(library) for library in libraries] == ["13", "13"]

    written = [library.stat().st_mtime_ns for library in libraries]
    again = compiled()
    assert (again.modules, again.fresh, toolkit.compiled - before) == (("norm", "rope"), (), files)
    assert [library.stat().st_mtime_ns for library in libraries] == written

    libraries[1].unlink()
    toolkit.refusal.touch()
    error = refused()
    assert (
        error.unsupported.fault.name == "COMPILE_FAILED"
        and "no such register" in error.unsupported.detail
        and "\n" not in error.unsupported.detail
    )
    assert "no such register" in (libraries[1].parent / "rtp_llm.log").read_text()
    assert [module.generate.name for module in error.failed] == ["gen_rope_module"]
    toolkit.refusal.unlink()
    assert compiled().fresh == ("rope",), "only what was not there"


def test_compiled_once_and_by_the_right_cuda(tmp_path: Path) -> None:
    """What a compiler of another CUDA made is refused and made anew; what is there is left alone; a compiler's words reach the
    user with the modules that they are about, and do not spoil the next try."""
    run_ranks(1, _one_after_another, str(tmp_path), env=Toolkit(tmp_path).env)


def _all_at_once() -> tuple[str, ...]:
    return compiled().fresh


def _of_another_cuda() -> None:
    refused()


def test_processes_of_a_host_take_turns(tmp_path: Path) -> None:
    """Ranks that start together on what another CUDA has left compile each module once between them, and all of them can load it:
    nobody takes away what another has just made."""
    toolkit = Toolkit(tmp_path)
    toolkit.install("12.9")
    run_ranks(1, _of_another_cuda, env=toolkit.env)
    toolkit.install("13.0")
    toolkit.log.unlink()
    results = [result.value for result in run_ranks(2, _all_at_once, env=toolkit.env)]
    assert sorted(results) == [(), ("norm", "rope")]
    assert toolkit.compiled == 4, "two files each"


def _loaded_as_on_a_gpu(checkpoint: str, setting: str) -> dict[str, str | None]:
    with pytest.MonkeyPatch.context() as patch:
        # The one thing that cannot be had: a GPU's name.
        patch.setattr("rtp_llm.loader.kernels.device_facts", lambda device: HOPPER)
        model = prepared(checkpoint).model
        setup = KernelSetup(plan_kernels(model, torch.bfloat16, setting, torch.device("cpu")), speaks=True)
        report = setup.bind(model, [setup.wait(lambda: None)])
    return {choice.op: choice.fault for choice in report.choices}


def test_a_model_from_declaration_to_binding(tmp_path: Path) -> None:
    """Resolved in the real wheel, compiled, loaded, bound; the toolkit's libraries have no functions in them, so modules that look
    for theirs when they are loaded cannot be used, and their operations, and no others, are torch's."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = save_tiny_llama(tmp_path / "llama", dtype=torch.bfloat16, **sizes)
    (result,) = run_ranks(1, _loaded_as_on_a_gpu, str(checkpoint), "auto", env=Toolkit(tmp_path).env)
    sound = {"rms_norm", "add_rms_norm", "rotate"}
    assert {op: fault for op, fault in result.value.items() if op in sound} == dict.fromkeys(sound)
    assert {fault for op, fault in result.value.items() if op not in sound} == {"COMPILE_FAILED"}


def _without_tools(folder: str) -> None:
    toolkit = Toolkit(Path(folder))
    compiled()
    (toolkit.cached / "rope" / "rope.so").unlink()
    (toolkit.folder / "cuda" / "bin" / "nvcc").unlink()
    with pytest.raises(CompileError) as caught:
        check_tools(modules(), "13.0")
    assert caught.value.unsupported.fault.name == "NO_COMPILER" and "nvcc" in caught.value.unsupported.detail
    assert [module.generate.name for module in caught.value.failed] == ["gen_rope_module"], "what is compiled needs no compiler"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", folder)
        with pytest.raises(CompileError) as caught:
            check_tools(modules(), "13.0")
    assert "ninja is not on PATH" in caught.value.unsupported.detail and caught.value.failed == modules()


def test_without_compiler(tmp_path: Path) -> None:
    """Said before a weight is read, of just those modules that cannot be had: without nvcc, of those that are not compiled;
    without ninja, which flashinfer asks each time, of all."""
    run_ranks(1, _without_tools, str(tmp_path), env=Toolkit(tmp_path).env)


def _fallen_back(folder: str) -> None:
    toolkit = Toolkit(Path(folder))
    needs = tuple(need for need in NEEDS if need.op in ("rms_norm", "add_rms_norm", "rotate"))
    choices = choose_kernels("auto", FLASHINFER, needs, {}, HOPPER)
    assert compiled().fresh == ("norm", "rope")
    toolkit.refusal.touch()
    (toolkit.cached / "rope" / "rope.so").unlink()

    setup = KernelSetup(KernelPlan("auto", choices, needs, HOPPER), speaks=False)
    message = setup.wait(lambda: None)
    model = nn.ModuleList([RMSNorm("norm", 8, 1e-6, dtype=torch.float32)])
    ours = setup.bind(model, [None, message]).choices
    assert [(c.op, c.backend, c.fault) for c in ours if c.backend == "torch"] == [("rotate", "torch", "COMPILE_FAILED")]
    assert "no such register" in next(c.reason for c in ours if c.op == "rotate")

    toolkit.refusal.unlink()
    sound = KernelSetup(KernelPlan("auto", choices, needs, HOPPER), speaks=False)
    assert sound.wait(lambda: None) is None
    assert sound.bind(model, [message, None]).choices == ours, "a rank that could is held to what another could not"

    toolkit.refusal.touch()
    (toolkit.cached / "rope" / "rope.so").unlink()
    named = KernelSetup(KernelPlan("flashinfer", choices, needs, HOPPER), speaks=False)
    try:
        named.wait(lambda: None)
    except KernelError as error:
        assert [p.code for p in error.problems] == ["COMPILE_FAILED"] and "rotate" in error.problems[0].what
    else:
        raise AssertionError("asked for by name, and not refused")


def test_what_cannot_be_compiled_is_done_by_torch_on_all_ranks(tmp_path: Path) -> None:
    """Under auto one rank's compiler decides for all, and only about the operations whose module it refused; by name it is an
    error."""
    run_ranks(1, _fallen_back, str(tmp_path), env=Toolkit(tmp_path).env)
