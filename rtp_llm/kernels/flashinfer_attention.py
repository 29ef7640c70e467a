"""Attention over pages by flashinfer (Ye et al., 2025, arXiv:2501.01005), and what of it version 0.6.6 supports.

One module of kernels, its ``fa2``, does prefill and, through ``use_tensor_cores``, decode, with any number of query heads to a
key/value head.  ``plan`` of a wrapper divides a pass between the GPU's processors, on the host.  With
``use_cuda_graph`` it writes the result into the same tensors each time, so a recorded ``run`` stays right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from rtp_llm.kernels.attention import TORCH_ATTENTION, AttentionCall, AttentionNeed, Call, LatentCall, LatentNeed, TorchPlan
from rtp_llm.kernels.flashinfer_kernels import CAPABILITY, HALVES
from rtp_llm.kernels.functions import JitModule, KernelFunction
from rtp_llm.kernels.paging import PAGE_SIZE, HostRows, PagedRows
from rtp_llm.kernels.symbols import Symbol, called

#: Bytes for partial results, at least: what flashinfer's documentation recommends.
_WORKSPACE_BYTES = 128 << 20

#: Head sizes that its tests cover, and the only sizes of latent and rotated key that its latent kernels are written for.
_HEADS = (64, 128, 256)
_LATENT = (512, 64)

#: Queries of a tile of ``fa2`` in decode, for up to as many query heads to a key/value head.  With more, tiles are of 64 and 128, and
#: partial results for all rows of a large batch take gigabytes; with 16 at most 69 MB for a small one on an H200.
_TILE = 16

#: Queries of its largest tile, which prompts have; heads of 256 and more elements have tiles of half as many.
_LARGEST_TILE = 128

#: What alignment may take, and more.
_SLACK_BYTES = 1 << 20

#: Blocks of a processor among which it divides a pass (``PrefillPlan`` in its scheduler.cuh).
_BLOCKS = 2

#: Kernels of Ampere and later, which run on Hopper too.  (Its ``fa3`` is Hopper's own, and another module: to be measured.)
_BACKEND = "fa2"

_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
_MLA = "BatchMLAPagedAttentionWrapper"

_DECODE_INIT = Symbol(
    "flashinfer.decode",
    _DECODE,
    (
        "float_workspace_buffer",
        "kv_layout",
        "use_cuda_graph",
        "use_tensor_cores",
        "paged_kv_indptr_buffer",
        "paged_kv_indices_buffer",
        "paged_kv_last_page_len_buffer",
        "backend",
    ),
)
_DECODE_PLAN = Symbol(
    "flashinfer.decode",
    f"{_DECODE}.plan",
    (
        "indptr",
        "indices",
        "last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "page_size",
        "window_left",
        "q_data_type",
        "kv_data_type",
        "sm_scale",
    ),
)
_DECODE_RUN = Symbol("flashinfer.decode", f"{_DECODE}.run", ("q", "paged_kv_cache"))
_PREFILL_INIT = Symbol("flashinfer.prefill", _PREFILL, ("float_workspace_buffer", "kv_layout", "backend"))
_PREFILL_PLAN = Symbol(
    "flashinfer.prefill",
    f"{_PREFILL}.plan",
    (
        "qo_indptr",
        "paged_kv_indptr",
        "paged_kv_indices",
        "paged_kv_last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim_qk",
        "page_size",
        "causal",
        "sm_scale",
        "window_left",
        "q_data_type",
        "kv_data_type",
    ),
)
_PREFILL_RUN = Symbol("flashinfer.prefill", f"{_PREFILL}.run", ("q", "paged_kv_cache"))
_MLA_INIT = Symbol(
    "flashinfer.mla", _MLA, ("float_workspace_buffer", "use_cuda_graph", "qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "backend")
)
_MLA_PLAN = Symbol(
    "flashinfer.mla",
    f"{_MLA}.plan",
    (
        "qo_indptr",
        "kv_indptr",
        "kv_indices",
        "kv_len_arr",
        "num_heads",
        "head_dim_ckv",
        "head_dim_kpe",
        "page_size",
        "causal",
        "sm_scale",
        "q_data_type",
        "kv_data_type",
    ),
)
_MLA_RUN = Symbol("flashinfer.mla", f"{_MLA}.run", ("q_nope", "q_pe", "ckv_cache", "kpe_cache"))

_GENERATE = Symbol("flashinfer.jit", "gen_batch_prefill_module", positional=11)
_LOAD = Symbol("flashinfer.prefill", "get_batch_prefill_module", positional=1)
_GENERATE_MLA = Symbol("flashinfer.jit", "gen_batch_mla_module", positional=8)
_LOAD_MLA = Symbol("flashinfer.mla", "get_batch_mla_module", positional=1)


@dataclass(frozen=True, slots=True)
class _Pages:
    """The pages of a pass as flashinfer takes them, int32 on the CPU: ``indptr [rows + 1]`` into ``indices``, ``lengths [rows]``,
    and how much of each row's last page is in use."""

    indptr: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor

    @classmethod
    def of(cls, host: HostRows) -> _Pages:
        lengths = torch.tensor(host.lengths, dtype=torch.int32)
        counts = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
        indptr = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        used = torch.arange(host.tables.shape[1]) < counts[:, None]
        return cls(indptr, host.tables[used], lengths, lengths - (counts - 1) * PAGE_SIZE)


def _every(rows: int, tokens: int) -> torch.Tensor:
    """Offsets of each row's queries, and the end."""
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32)


class _Wrapped:
    """A wrapper of flashinfer, and the ``fixed`` tensors that a recorded run reads."""

    def __init__(self, wrapper: Any, fixed: Sequence[torch.Tensor] = ()) -> None:
        self.wrapper, self._fixed = wrapper, tuple(fixed)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self._fixed

    def plan(self, **arguments: Any) -> None:
        """Plans a pass, after the last plan was copied to the device: the wrapper reuses the host memory of that copy."""
        self._copied.synchronize()
        self.wrapper.plan(**arguments)
        self._copied.record()


class FlashInferAttention:
    """Calls flashinfer; its symbols must be resolved before.  One pass at a time."""

    def __init__(self) -> None:
        self._decode, self._prefill, self._mla = called(_DECODE_INIT), called(_PREFILL_INIT), called(_MLA_INIT)
        self._workspace: torch.Tensor | None = None
        self._made: dict[tuple[Call, bool], _Wrapped] = {}

    def plan(self, call: Call, rows: PagedRows) -> _Wrapped | TorchPlan:
        """A wrapper that has planned the pass.  Passes of one kind share a wrapper; fixed rows have their own.

        Torch does prompts over latents.  Expanded keys take a third of the products, and flashinfer's planner writes beyond its
        memory for more than 16,384 tiles (``MLAPlan`` in its scheduler.cuh), which a long prompt has.
        """
        decode = rows.host.tokens == 1
        if isinstance(call, LatentCall) and not decode:
            return TORCH_ATTENTION.plan(call, rows)
        if rows.fixed:
            made = self._fixed(call, rows)
        else:
            if (call, decode) not in self._made:
                self._made[call, decode] = self._eager(call, decode, rows.cache_rows.device)
            made = self._made[call, decode]
        self.renew(made, call, rows)
        return made

    def renew(self, plan: _Wrapped, call: Call, rows: PagedRows) -> None:
        """Plans a later pass, in the same tensors."""
        host, pages = rows.host, _Pages.of(rows.host)
        if isinstance(call, LatentCall):
            self._plan_latent(plan, call, host, pages)
            return
        shared: dict[str, Any] = {
            "num_qo_heads": call.heads,
            "num_kv_heads": call.kv_heads,
            "page_size": PAGE_SIZE,
            # flashinfer counts the tokens to the left of a token.
            "window_left": -1 if call.window is None else call.window - 1,
            "q_data_type": call.dtype,
            "kv_data_type": call.dtype,
            "sm_scale": call.head_dim**-0.5,
        }
        if host.tokens == 1:
            plan.plan(indptr=pages.indptr, indices=pages.indices, last_page_len=pages.last, head_dim=call.head_dim, **shared)
        else:
            plan.plan(
                qo_indptr=_every(len(host.cache_rows), host.tokens),
                paged_kv_indptr=pages.indptr,
                paged_kv_indices=pages.indices,
                paged_kv_last_page_len=pages.last,
                head_dim_qk=call.head_dim,
                causal=True,
                **shared,
            )

    def _plan_latent(self, plan: _Wrapped, call: LatentCall, host: HostRows, pages: _Pages) -> None:
        plan.plan(
            qo_indptr=_every(len(host.cache_rows), host.tokens),
            kv_indptr=pages.indptr,
            kv_indices=pages.indices,
            kv_len_arr=pages.lengths,
            num_heads=call.heads,
            head_dim_ckv=call.latent_dim,
            head_dim_kpe=call.rope_dim,
            page_size=PAGE_SIZE,
            causal=False,
            sm_scale=call.scale,
            q_data_type=call.dtype,
            kv_data_type=call.dtype,
        )

    def attend(
        self, plan: _Wrapped, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert sinks is None, "refused by _limit"
        out: torch.Tensor = plan.wrapper.run(q=q.contiguous(), paged_kv_cache=(k_pages, v_pages))
        return out

    def attend_latent(
        self, plan: _Wrapped, q_latent: torch.Tensor, q_rope: torch.Tensor, latent_pages: torch.Tensor, rope_pages: torch.Tensor
    ) -> torch.Tensor:
        out: torch.Tensor = plan.wrapper.run(
            q_nope=q_latent.contiguous(), q_pe=q_rope.contiguous(), ckv_cache=latent_pages, kpe_cache=rope_pages
        )
        return out

    def _eager(self, call: Call, decode: bool, device: torch.device) -> _Wrapped:
        workspace = self._space(call, 1, device)
        if isinstance(call, LatentCall):
            return _Wrapped(self._mla(float_workspace_buffer=workspace, backend=_BACKEND))
        if decode:
            return _Wrapped(self._decode(float_workspace_buffer=workspace, kv_layout="NHD", use_tensor_cores=True, backend=_BACKEND))
        return _Wrapped(self._prefill(float_workspace_buffer=workspace, kv_layout="NHD", backend=_BACKEND))

    def _fixed(self, call: Call, rows: PagedRows) -> _Wrapped:
        count, device = len(rows.cache_rows), rows.cache_rows.device

        def whole(size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        indptr, indices = whole(count + 1), whole(rows.tables.numel())
        if isinstance(call, LatentCall):
            queries, lengths = whole(count + 1), whole(count)
            wrapper = self._mla(
                float_workspace_buffer=self._space(call, count, device),
                use_cuda_graph=True,
                qo_indptr=queries,
                kv_indptr=indptr,
                kv_indices=indices,
                kv_len_arr=lengths,
                backend=_BACKEND,
            )
            return _Wrapped(wrapper, (queries, indptr, indices, lengths))
        last = whole(count)
        wrapper = self._decode(
            float_workspace_buffer=self._space(call, count, device),
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend=_BACKEND,
        )
        return _Wrapped(wrapper, (indptr, indices, last))

    def _space(self, call: Call, rows: int, device: torch.device) -> torch.Tensor:
        """Memory for partial results of prompts and of up to ``rows`` rows of decode.  All wrappers share it, since their kernels run
        one after the other.  flashinfer needs it zero at first."""
        nbytes = _WORKSPACE_BYTES
        if isinstance(call, AttentionCall):
            nbytes = max(nbytes, _partial_bytes(call, rows, torch.cuda.get_device_properties(device).multi_processor_count))
        if self._workspace is None or self._workspace.numel() < nbytes or self._workspace.device != device:
            self._workspace = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        return self._workspace


def _partial_bytes(call: AttentionCall, rows: int, processors: int) -> int:
    """Bytes that ``fa2`` may take for a prompt, or for a recorded run of ``rows`` rows (``PrefillPlan`` in its scheduler.cuh): float32
    values and their sums for each tile of queries, which are those of one key/value head.

    A prompt that is divided has at most one tile for each block; a recorded run has as many, or one for each row if those are more.
    """
    blocks = _BLOCKS * processors // call.kv_heads
    prompt = blocks * (_LARGEST_TILE if call.head_dim < 256 else _LARGEST_TILE // 2)
    recorded = max(blocks, -(-rows * call.heads // (call.kv_heads * _TILE)) + rows) * _TILE
    return call.heads * max(prompt, recorded) * (call.head_dim + 1) * 4 + _SLACK_BYTES


def _limit(need: AttentionNeed) -> str:
    call = need.call
    if call.sinks:
        return "attention with sinks, which these kernels of it do not have"
    if call.head_dim not in _HEADS:
        return f"heads of {call.head_dim} elements, where there is {', '.join(map(str, _HEADS))}"
    if call.heads > call.kv_heads * _TILE:
        return f"{call.heads // call.kv_heads} query heads to a key, where partial results of more than {_TILE} do not fit the workspace"
    return ""


def _latent_limit(need: LatentNeed) -> str:
    call = need.call
    if (call.latent_dim, call.rope_dim) != _LATENT:
        return f"latents of {call.latent_dim} and shared keys of {call.rope_dim} elements, where there is {_LATENT[0]} and {_LATENT[1]}"
    return "sparse attention, which it does not have for these pages" if need.sparse else ""


def _modules(need: AttentionNeed) -> Iterator[JitModule]:
    call = need.call
    # Dtypes of queries, keys and output, of page numbers; head sizes; no rotation; window; no cap on scores; float32 sums.
    sizes = (call.dtype, call.dtype, call.dtype, torch.int32, call.head_dim, call.head_dim, 0, call.window is not None, False, False)
    yield JitModule(_GENERATE, _LOAD, (_BACKEND, *sizes))


def _latent_modules(need: LatentNeed) -> Iterator[JitModule]:
    call = need.call
    # Dtypes as above; sizes; no profiler.
    yield JitModule(
        _GENERATE_MLA, _LOAD_MLA, (_BACKEND, call.dtype, call.dtype, call.dtype, torch.int32, call.latent_dim, call.rope_dim, False)
    )


#: The operations that layers call through their ``attention``.
FUNCTIONS: Mapping[str, KernelFunction] = MappingProxyType(
    {
        "attention.prefill": KernelFunction((_PREFILL_INIT, _PREFILL_PLAN, _PREFILL_RUN), HALVES, CAPABILITY, _limit, _modules),
        "attention.decode": KernelFunction((_DECODE_INIT, _DECODE_PLAN, _DECODE_RUN), HALVES, CAPABILITY, _limit, _modules),
        "mla.decode": KernelFunction((_MLA_INIT, _MLA_PLAN, _MLA_RUN), HALVES, CAPABILITY, _latent_limit, _latent_modules),
    }
)
