"""Decoding on one GPU: attention's back ends against each other, CUDA graphs against plain passes, and a real model.

Tagged ``gpu``: run with ``make pytest ARGS="-m gpu tests/gpu/test_decode_gpu.py"``.  The first run compiles flashinfer's modules,
which takes minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rtp_llm import LoadConfig, load_model
from rtp_llm.cli import main
from rtp_llm.kernels.attention import TORCH_ATTENTION, AttentionCall, LatentCall
from rtp_llm.kernels.flashinfer_attention import FlashInferAttention
from rtp_llm.kernels.paging import PAGE_SIZE, HostRows, PagedRows
from rtp_llm.layers.cache import CacheSize
from rtp_llm.runtime.generation import EagerDecoder, Generation, GenerationRequest, cache_size
from rtp_llm.runtime.graphs import CudaCapture, GraphDecoder, decoding
from rtp_llm.runtime.tokenizer import encode_prompt, load_tokenizer
from tests.models import decoders, latents
from tests.models.reference import SMALL, make, randomise, token_ids
from tests.moe import variants as experts
from tests.quantization.formats import FORMATS
from tests.quantization.formats import make as make_format

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
#: What bfloat16 leaves of sums that are taken in another order.
TOLERANCE = 2e-2

#: Sizes that flashinfer has kernels for, on top of those of the small models.
_HEADS = {"head_dim": 64}
_LATENT = {**latents.SMALL, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 3}
#: More tokens than the sequences here have, so that no choice hangs on a last bit, and fewer than a recording has room for.
_INDEX = {"index_n_heads": 16, "index_head_dim": 128, "index_topk": 60}
_DENSE = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}

#: Without experts, which a last bit may send a token to another of: family, options, and who is to attend under ``auto``.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", _HEADS, "flashinfer"),
    "llama-multi-query": ("llama", {**_HEADS, "num_key_value_heads": 1}, "flashinfer"),
    "llama-small-heads": ("llama", {}, "torch"),
    "mistral-window": ("mistral", {"head_dim": 128, "sliding_window": 7}, "flashinfer"),
    "qwen2-late-window": (
        "qwen2",
        {"hidden_size": 384, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
        "flashinfer",
    ),
    "qwen3": ("qwen3", {"head_dim": 128}, "flashinfer"),
    "v2": ("deepseek_v2", {**_LATENT, **_DENSE, "first_k_dense_replace": 3}, "flashinfer"),
    "v3": ("deepseek_v3", {**_LATENT, **_DENSE, "first_k_dense_replace": 3}, "flashinfer"),
    "v32": ("deepseek_v32", {**_LATENT, **_DENSE, **_INDEX, "first_k_dense_replace": 3}, "torch"),
}

#: The widest of them, whose longer sums differ more between back ends: 0.9989 on an H200.
LEAST = {"qwen2-late-window": 0.998}

#: With experts: each is decoded by graphs, against plain passes by the same kernels.
WITH_EXPERTS = ("qwen3_moe", "mixtral", "glm4_moe", "gpt_oss")


def saved(name: str, folder: Path) -> str:
    """A checkpoint in bfloat16."""
    family, options, _ = FAMILIES[name]
    if family in decoders.FAMILIES:
        config_class, model_class = decoders.FAMILIES[family]
        make(model_class, config_class(**{**SMALL, **options}), folder, dtype=torch.bfloat16)
        return str(folder)
    config_class, model_class = latents.FAMILIES[family]
    model = model_class(config_class(**options)).eval()
    randomise(model)
    model.save_pretrained(folder)
    model_class.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def loaded(folder: str | Path, kernels: str = "auto", **settings: Any) -> Any:
    return load_model(str(folder), load=LoadConfig(device="cuda", kernels=kernels, progress=False, **settings))


def attends(report: dict[str, Any]) -> set[str]:
    """Who attends over pages."""
    return {o["backend"] for o in report["kernels"]["operations"] if o["op"].startswith(("attention.", "mla."))}


PROMPTS = (3, 33, 9)
STEPS = 6


@torch.inference_mode()
def decoded(model: Any, ids: torch.Tensor, *, graphs: bool = False) -> torch.Tensor:
    """Logits ``[steps, sequences, vocab]``: prompts one by one, then all together, but for the last steps, of two of the three."""
    cache = model.cache_of(CacheSize(4, 16, 64))
    cache_rows = [cache.take() for _ in PROMPTS]
    for cache_row, prompt in zip(cache_rows, PROMPTS, strict=True):
        model(ids[cache_row : cache_row + 1, :prompt].cuda(), cache, [cache_row])
    decode = GraphDecoder(model, cache, (1, 4), CudaCapture(CUDA)) if graphs else EagerDecoder(model, cache)
    found = []
    for step in range(STEPS):
        live = cache_rows if step < STEPS - 2 else [cache_rows[2], cache_rows[0]]
        tokens = [int(ids[cache_row, PROMPTS[cache_row] + step]) for cache_row in live]
        found += list(decode(tokens, live).float().cpu())
    return torch.stack(found)


def alike(a: torch.Tensor, b: torch.Tensor, least: float = 0.999) -> None:
    """Logits point the same way, most with a cosine above ``least``; one token that a last bit has sent to another expert, or to
    another neighbour, may differ."""
    assert a.isfinite().all() and b.isfinite().all()
    cosines = torch.cosine_similarity(a, b, dim=-1)
    assert cosines.quantile(0.2) > least and cosines.mean() > 0.99, cosines


def pages_of(past: tuple[int, ...], tokens: int, *shapes: tuple[int, ...], fixed: bool = False) -> tuple[PagedRows, list[torch.Tensor]]:
    """Rows whose pages lie in any order, and pages of those shapes, NaN where no row has a token."""
    width = max(-(-(p + tokens) // PAGE_SIZE) for p in past)
    order = (torch.randperm(len(past) * width, generator=torch.Generator().manual_seed(1)) + 1).view(len(past), width).int()
    rows = PagedRows.of(HostRows(tokens, tuple(range(len(past))), past, order), CUDA, fixed=fixed)
    generator = torch.Generator().manual_seed(2)
    made = []
    for shape in shapes:
        pages = torch.full((len(past) * width + 1, PAGE_SIZE, *shape), float("nan"))
        for row, p in enumerate(past):
            for position in range(p + tokens):
                pages[order[row, position // PAGE_SIZE], position % PAGE_SIZE] = torch.randn(shape, generator=generator)
        made.append(pages.to(CUDA, torch.bfloat16))
    return rows, made


def queries(count: int, *shape: int) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(3)).to(CUDA, torch.bfloat16)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 8, 64), (9, 3, 64), (32, 8, 128), (7, 1, 128), (4, 2, 256)])
@pytest.mark.parametrize("window", [None, 20])
def test_attention(tokens: int, heads: int, kv_heads: int, dim: int, window: int | None) -> None:
    """Against float32 torch: groups of any size, windows, rows of all lengths; what lies in unused places is not looked at."""
    past = (0, 15, 16, 100, 700)
    rows, (k, v) = pages_of(past, tokens, (kv_heads, dim), (kv_heads, dim))
    q = queries(len(past) * tokens, heads, dim)
    kernels = FlashInferAttention()
    call = AttentionCall(heads, kv_heads, dim, torch.bfloat16, window)
    found = kernels.attend(kernels.plan(call, rows), q, k, v)
    wanted = TORCH_ATTENTION.attend(TORCH_ATTENTION.plan(call, rows), q.float(), k.float(), v.float())
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (16, 1)])
@pytest.mark.parametrize("tokens", [256, 512])
def test_prompts_that_are_divided(tokens: int, heads: int, kv_heads: int) -> None:
    """Partial results of whole prompts take more than flashinfer's usual 128 MiB of work space with so many heads to a key."""
    rows, (k, v) = pages_of((0,), tokens, (kv_heads, 128), (kv_heads, 128))
    q = queries(tokens, heads, 128)
    kernels, call = FlashInferAttention(), AttentionCall(heads, kv_heads, 128, torch.bfloat16)
    found = kernels.attend(kernels.plan(call, rows), q, k, v)
    wanted = TORCH_ATTENTION.attend(TORCH_ATTENTION.plan(call, rows), q.float(), k.float(), v.float())
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("heads", [4, 16, 128])
def test_latent_attention(heads: int) -> None:
    """The same for latents, one token a row."""
    past = (0, 15, 16, 100, 700)
    rows, (latent, rope) = pages_of(past, 1, (512,), (64,))
    q_latent, q_rope = queries(len(past), heads, 512), queries(len(past), heads, 64)
    kernels = FlashInferAttention()
    call = LatentCall(heads, 512, 64, 0.05, torch.bfloat16)
    found = kernels.attend_latent(kernels.plan(call, rows), q_latent, q_rope, latent, rope)
    plan = TORCH_ATTENTION.plan(call, rows)
    wanted = TORCH_ATTENTION.attend_latent(plan, q_latent.float(), q_rope.float(), latent.float(), rope.float())
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("latent", [False, True])
def test_a_recorded_run_follows_later_plans(latent: bool) -> None:
    """A graph that was recorded for short rows is right for long ones, once they are planned, and for short ones again."""
    kernels, shapes = FlashInferAttention(), ((512,), (64,)) if latent else ((2, 128), (2, 128))
    call = LatentCall(16, 512, 64, 0.05, torch.bfloat16) if latent else AttentionCall(8, 2, 128, torch.bfloat16)
    rows, pages = pages_of((900, 40, 200, 899), 1, *shapes, fixed=True)
    q = (queries(4, 16, 512), queries(4, 16, 64)) if latent else (queries(4, 8, 128),)

    def run(kernels: Any, plan: Any, values: tuple[torch.Tensor, ...], held: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = kernels.attend_latent(plan, *values, *held) if latent else kernels.attend(plan, *values, *held)
        return out

    short = rows.refilled(HostRows(1, rows.host.cache_rows, (0, 3, 16, 2), rows.host.tables))
    plan = kernels.plan(call, short)
    replay = CudaCapture(CUDA)(lambda: run(kernels, plan, q, pages))
    for past in ((900, 40, 200, 899), (0, 3, 16, 2), (31, 39, 1, 64)):
        later = rows.refilled(HostRows(1, rows.host.cache_rows, past, rows.host.tables))
        kernels.renew(plan, call, later)
        found = replay()
        eager = TORCH_ATTENTION.plan(call, later)
        wanted = run(TORCH_ATTENTION, eager, tuple(part.float() for part in q), [part.float() for part in pages])
        # What lies behind a row's tokens is NaN here, or those that it had before; nobody looks there.
        torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", FAMILIES)
def test_back_ends_give_the_same_logits(name: str, tmp_path: Path) -> None:
    """Unequal lengths in one batch, by whoever is chosen and by torch alone; graphs with idle rows by both."""
    folder = saved(name, tmp_path)
    ids = token_ids(3, max(PROMPTS) + STEPS)
    chosen, plain = loaded(folder), loaded(folder, "torch")
    assert attends(chosen.report.to_json()) == {FAMILIES[name][2]} and attends(plain.report.to_json()) == {"torch"}
    wanted, least = decoded(plain.model, ids), LEAST.get(name, 0.999)
    alike(decoded(chosen.model, ids), wanted, least)
    alike(decoded(chosen.model, ids, graphs=True), wanted, least)
    alike(decoded(plain.model, ids, graphs=True), wanted)


@pytest.mark.parametrize("name", [*WITH_EXPERTS, "v3", "kimi-linear"])
def test_graphs_with_experts_and_states(name: str, tmp_path: Path) -> None:
    """Grouped products and delta attention are recorded too."""
    if name in WITH_EXPERTS:
        experts.make(name, tmp_path, dtype=torch.bfloat16)
    else:
        latents.save(name, tmp_path, dtype=torch.bfloat16)
    model = loaded(tmp_path).model
    ids = token_ids(3, max(PROMPTS) + STEPS)
    alike(decoded(model, ids, graphs=True), decoded(model, ids))


@pytest.mark.parametrize("name", ["fp8-block", "fp8-tensor", "gptq-order", "awq", "modelopt-nvfp4"])
def test_graphs_with_quantised_layers(name: str, tmp_path: Path) -> None:
    """Products on codes and on what is dequantised for each product are recorded too."""
    make_format(FORMATS[name], "llama", tmp_path)
    model = loaded(tmp_path, dtype="bfloat16").model
    ids = token_ids(3, max(PROMPTS) + STEPS)
    alike(decoded(model, ids, graphs=True), decoded(model, ids))


def test_what_waits_for_the_host_is_not_recorded(tmp_path: Path) -> None:
    """Experts in float32 are multiplied one by one: said, and decoded eagerly, with the same result."""
    experts.make("mixtral", tmp_path)
    model = loaded(tmp_path).model
    cache = model.cache_of(CacheSize(2, 8, 64))
    way = decoding(model, cache)
    assert not way.sizes and "one by one" in way.reason
    cache_row = cache.take()
    assert way.decoder([5], [cache_row]).shape == (1, 101)


@pytest.mark.parametrize(("kernels", "graphs"), [("torch", False), ("torch", True), ("flashinfer", False), ("flashinfer", True)])
def test_smollm2_says_what_is_likeliest(kernels: str, graphs: bool, smollm2: Path) -> None:
    """128 greedy tokens for each of five prompts at once: every one is the likeliest in float32, or within the last bits of
    bfloat16 of it."""
    tokenizer = load_tokenizer(smollm2)
    subjects = ("the sea", "how bread is made", "an old clock", "why it rains and where the rain goes", "x")
    prompts = [tuple(encode_prompt(tokenizer, f"Here is a long text about {subject}.", raw=True)) for subject in subjects]
    requests = [GenerationRequest(prompt, 128) for prompt in prompts]
    model = loaded(smollm2, kernels).model
    cache = model.cache_of(cache_size(requests, 5))
    way = decoding(model, cache, graphs=graphs)
    assert bool(way.sizes) == graphs, way.reason
    generation = Generation(model, requests, cache, decoder=way.decoder)
    answers = {event.index: event.answer for event in generation.events() if event.answer is not None}
    reference = loaded(smollm2, "torch", dtype="float32").model
    for index, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *answers[index].ids]], device=CUDA)
        with torch.inference_mode():
            logits = reference(ids)[0, len(prompt) - 1 : -1]
        said = ids[0, len(prompt) :]
        assert len(said) == 128
        behind = logits.max(dim=-1).values - logits.gather(1, said[:, None])[:, 0]
        # A logit of 20 has steps of 0.125 in bfloat16, and sums of thirty layers add a few.
        assert behind.max() < 1.0 and (behind == 0).float().mean() > 0.9


def test_the_command_decodes_by_graphs(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``generate`` records by itself, and says so; without them the answer is the same.  In float32, since the likeliest first word
    is ahead of the next one by less than a step of bfloat16."""
    command = ["generate", str(smollm2), "--device", "cuda", "--prompt", "What is the capital of France?", "--prompt", "Name a colour."]
    command += ["--max_new_tokens", "8", "--dtype", "float32", "--json"]
    told = []
    for flags in ([], ["--no_cuda_graphs"]):
        assert main([*command, *flags]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [document["cuda_graphs"]["used"] for document in told] == [True, False]
    assert told[0]["cuda_graphs"]["batch_sizes"] == [1, 2] and told[1]["cuda_graphs"]["reason"] == "not asked for"
    assert all(document["text"] == "The capital of France is Paris." for document in told)


def test_a_recording_that_fails_is_left(tmp_path: Path) -> None:
    """Work that waits for the host raises, on the stream that was current before; plain passes go on as if nothing had been tried."""
    model = loaded(saved("llama", tmp_path)).model
    ids = token_ids(3, max(PROMPTS) + STEPS)
    wanted, before = decoded(model, ids), torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        CudaCapture(CUDA)(lambda: torch.ones(2, device=CUDA) * torch.ones(2, device=CUDA).sum().item())
    assert torch.cuda.current_stream() == before
    alike(decoded(model, ids), wanted)
