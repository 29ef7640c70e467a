"""flashinfer's operations on one GPU: each against float32, inside a CUDA graph too, and a model that is loaded with them.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu"`` on a machine that has one, ninja and nvcc of torch's CUDA.
The first run compiles for a minute or two; what it has compiled serves the next one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.kernels.backends import FLASHINFER
from rtp_llm.kernels.compile import Compilation, cuda_major
from rtp_llm.kernels.flashinfer_kernels import FlashInferKernels
from rtp_llm.kernels.torch_kernels import TORCH
from tests.kernels.declared import NEEDS
from tests.models.reference import closeness
from tests.support.paths import child_env
from tests.support.tiny import save_tiny_llama

pytestmark = pytest.mark.gpu

#: Two roundings to the dtype: one of the reference's inputs does not count, one of the result and one within.
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate")


@pytest.fixture(scope="module")
def kernels() -> FlashInferKernels:
    cuda = torch.version.cuda
    assert cuda is not None
    modules = dict.fromkeys(m for need in NEEDS if need.op in OPS for m in FLASHINFER.functions[need.op].modules(need))
    made = Compilation(tuple(modules), cuda).result(10, print, lambda: None)
    libraries = [Path(made.directory) / name / f"{name}.so" for name in made.modules]
    assert {cuda_major(library) for library in libraries if library.exists()} <= {cuda.partition(".")[0]}
    return FlashInferKernels()


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("size", [64, 576, 4096, 7168])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (300,)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms(kernels: FlashInferKernels, dtype: torch.dtype, rows: tuple[int, ...], size: int) -> None:
    """Rows of any number of dimensions; the sum with a residual comes back as well."""
    x, residual, weight = randn(*rows, size, dtype=dtype), randn(*rows, size, dtype=dtype, seed=1), randn(size, dtype=dtype, seed=2)
    close(kernels.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x.float(), weight.float(), 1e-5), dtype)
    wanted = TORCH.add_rms_norm(x.float(), residual.float(), weight.float(), 1e-5)
    for found, want in zip(kernels.add_rms_norm(x.clone(), residual.clone(), weight, 1e-5), wanted, strict=True):
        close(found, want, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_norms_of_heads(kernels: FlashInferKernels, dtype: torch.dtype) -> None:
    """Heads that lie apart in a wider product, as they are cut out of it."""
    product, weight = randn(9, 6 * 128, dtype=dtype), randn(128, dtype=dtype, seed=1)
    heads = product[:, 128 : 5 * 128].unflatten(-1, (-1, 128))
    assert not heads.is_contiguous()
    close(kernels.rms_norm(heads, weight, 1e-6), TORCH.rms_norm(heads.float(), weight.float(), 1e-6), dtype)


@pytest.mark.parametrize("first", [0, 3, 8])
def test_rows_that_lie_apart(kernels: FlashInferKernels, first: int) -> None:
    """A latent beside something else, on any address: also where no thread could load a vector."""
    product, weight = randn(9, 600 + first, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16, seed=1)
    rows = product[:, first : first + 512]
    close(kernels.rms_norm(rows, weight, 1e-6), TORCH.rms_norm(rows.float(), weight.float(), 1e-6), torch.bfloat16)


@pytest.mark.parametrize("size", [8, 1536, 14336])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (300,)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gate(kernels: FlashInferKernels, dtype: torch.dtype, rows: tuple[int, ...], size: int) -> None:
    """Also where the rows lie apart."""
    x = randn(*rows, 2 * size + 16, dtype=dtype)[..., : 2 * size]
    close(kernels.silu_and_mul(x), TORCH.silu_and_mul(x.float()), dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head", "rotary"), [(64, 64), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotation(kernels: FlashInferKernels, dtype: torch.dtype, head: int, rotary: int, interleaved: bool) -> None:
    """Queries and keys as they are cut out of one product; what is beyond ``rotary`` passes.  Interleaved pairs stay where they are."""
    product = randn(11, 6 * head, dtype=dtype)
    q, k = (part.unflatten(-1, (-1, head)) for part in product.split((4 * head, 2 * head), dim=-1))
    angles = torch.rand(11, rotary // 2, generator=torch.Generator().manual_seed(3)).cuda().repeat(1, 2) * 6
    cos, sin = angles.cos(), angles.sin()
    wanted = TORCH.rotate(q.float(), k.float(), (cos, sin), interleaved)
    for found, want in zip(kernels.rotate(q, k, kernels.rotary_tables(cos, sin), interleaved), wanted, strict=True):
        if interleaved:
            first, second, rest = want.split((rotary // 2, rotary // 2, head - rotary), dim=-1)
            want = torch.cat((torch.stack((first, second), dim=-1).flatten(-2), rest), dim=-1)
        close(found, want, dtype)


def test_one_shared_key_and_tables_of_the_models_dtype(kernels: FlashInferKernels) -> None:
    """As latent attention turns them: many queries, one key."""
    q, k = randn(5, 16, 64, dtype=torch.bfloat16), randn(5, 1, 64, dtype=torch.bfloat16, seed=1)
    angles = torch.rand(5, 32, generator=torch.Generator().manual_seed(3)).cuda().repeat(1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    wanted = TORCH.rotate(q, k, (cos, sin), False)
    for found, want in zip(kernels.rotate(q, k, kernels.rotary_tables(cos, sin), False), wanted, strict=True):
        close(found, want.float(), torch.bfloat16)


def graphed(call: Callable[[], Any]) -> Any:
    """What a captured call has written after it was replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    return out


def test_inside_a_graph(kernels: FlashInferKernels) -> None:
    """Every operation can be captured, and a replay gives what the call gives."""
    x, weight = randn(4, 512, dtype=torch.bfloat16), randn(512, dtype=torch.bfloat16, seed=1)
    q, k = randn(4, 8, 64, dtype=torch.bfloat16), randn(4, 2, 64, dtype=torch.bfloat16, seed=1)
    tables = kernels.rotary_tables(randn(4, 64, dtype=torch.float32), randn(4, 64, dtype=torch.float32, seed=1))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: (kernels.rms_norm(x, weight, 1e-6),),
        lambda: kernels.add_rms_norm(x.clone(), x.clone(), weight, 1e-6),
        lambda: (kernels.silu_and_mul(x),),
        lambda: kernels.rotate(q, k, tables, False),
    )
    for call in calls:
        for found, want in zip(graphed(call), call(), strict=True):
            assert torch.equal(found, want)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    return save_tiny_llama(tmp_path_factory.mktemp("gpu") / "llama", dtype=torch.bfloat16, **sizes)


def test_a_model_with_all_of_them(llama: Path) -> None:
    """By name nothing is left to torch; logits point where torch's point."""
    loaded = {name: load_model(llama, load=LoadConfig(device="cuda", kernels=name)) for name in ("flashinfer", "torch")}
    found = {o["op"]: o["backend"] for o in loaded["flashinfer"].report.to_json()["kernels"]["operations"]}
    assert set(OPS) <= set(found) and set(found.values()) == {"flashinfer"}
    ids = torch.arange(30, device="cuda")[None] * 7 % 512
    with torch.inference_mode():
        assert closeness(*(loaded[name].model(ids) for name in loaded)) > 0.999


def run(command: str, checkpoint: Path) -> dict[str, Any]:
    """The document of a command in a process of its own."""
    arguments = [sys.executable, "-m", "rtp_llm.cli", command, str(checkpoint), "--device", "cuda", "--kernels", "flashinfer", "--json"]
    done = subprocess.run(arguments, env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_after_a_warmup_nothing_is_compiled(llama: Path) -> None:
    """``rtp-llm warmup`` in one process, a load in another: the load finds every module, and writes none."""
    ahead = run("warmup", llama)["compiled"]
    written = {path: path.stat().st_mtime_ns for path in Path(ahead["directory"]).glob("*/*.so")}
    compiled = run("load", llama)["kernels"]["compiled"]
    assert compiled["modules"] == ahead["modules"] and compiled["fresh"] == []
    assert {path: path.stat().st_mtime_ns for path in written} == written


FIRST_REQUEST = """
import json, os, sys
from flashinfer.jit import gen_act_and_mul_module
from rtp_llm import LoadConfig, load_model
from rtp_llm.runtime.generation import Generation, GenerationRequest, cache_size
from rtp_llm.runtime.graphs import decoding

model = load_model(sys.argv[1], load=LoadConfig(device="cuda", kernels="flashinfer", progress=False)).model
os.environ["FLASHINFER_DISABLE_JIT"] = "1"
other = gen_act_and_mul_module("gelu")
refused = other.is_aot
try:
    other.build_and_load()
except RuntimeError as error:
    refused = "FLASHINFER_DISABLE_JIT" in str(error)
requests = [GenerationRequest((1, 2, 3), 4), GenerationRequest(tuple(range(40)), 4)]
cache = model.cache_of(cache_size(requests, 2))
way = decoding(model, cache)
events = Generation(model, requests, cache, decoder=way.decoder).events()
answers = [len(event.answer.ids) for event in events if event.answer is not None]
print(json.dumps({"refused": refused, "recorded": way.sizes, "answers": answers}))
"""


def test_the_first_request_compiles_nothing(llama: Path) -> None:
    """After a load flashinfer is told to build nothing, not even to ask ninja whether something is to be built: prompts, recordings and
    steps find every module loaded.  In a process of its own, where no earlier test has loaded one."""
    done = subprocess.run([sys.executable, "-c", FIRST_REQUEST, str(llama)], env=child_env(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"refused": True, "recorded": [1, 2], "answers": [4, 4]}
