"""The operations by flashinfer (Ye et al., 2025, arXiv:2501.01005), and which of them its version 0.6.6 supports.

Sums and products are float32 and rounded once, at the end: results differ from torch's in the last bit of the dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from rtp_llm.kernels.functions import JitModule, KernelFunction
from rtp_llm.kernels.needs import GateNeed, KernelNeed, NormNeed, RotaryNeed
from rtp_llm.kernels.symbols import Symbol, called
from rtp_llm.kernels.torch_kernels import RotaryTables

#: What its kernels are instantiated for (``DISPATCH_DLPACK_DTYPE_TO_CTYPE_FP16`` in its sources).
HALVES = frozenset({torch.bfloat16, torch.float16})

#: bfloat16 in hardware; flashinfer itself would take 7.5 for float16.
CAPABILITY = (8, 0)

#: Bytes that one thread loads at once: rows that are no multiple of it would be misaligned.
_VECTOR_BYTES = 16

#: Head sizes for which the rotation has a kernel of its own (``DISPATCH_HEAD_DIM`` in its sources, without 512, which takes
#: wider vectors), and of what the turned elements are a multiple: two vectors, one for each half.
_ROTARY_HEADS = (64, 128, 256)
_ROTARY_MULTIPLE = 2 * _VECTOR_BYTES // 2

_RMS_NORM = Symbol("flashinfer.norm", "rmsnorm", ("input", "weight", "eps"))
_ADD_RMS_NORM = Symbol("flashinfer.norm", "fused_add_rmsnorm", ("input", "residual", "weight", "eps"))
_SILU_AND_MUL = Symbol("flashinfer.activation", "silu_and_mul", ("input",))
_ROTATE = Symbol("flashinfer.rope", "apply_rope_with_cos_sin_cache", ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"))

_NORM_MODULE = JitModule(Symbol("flashinfer.jit.norm", "gen_norm_module"), Symbol("flashinfer.norm", "get_norm_module"))
_GATE_MODULE = JitModule(
    Symbol("flashinfer.jit", "gen_act_and_mul_module", positional=1),
    Symbol("flashinfer.activation", "get_act_and_mul_module", positional=1),
    ("silu",),
)
_ROTARY_MODULE = JitModule(Symbol("flashinfer.jit.rope", "gen_rope_module"), Symbol("flashinfer.rope", "get_rope_module"))


class FlashInferKernels:
    """Calls flashinfer; its symbols must be resolved before."""

    def __init__(self) -> None:
        self._rms_norm = called(_RMS_NORM)
        self._add_rms_norm = called(_ADD_RMS_NORM)
        self._silu_and_mul = called(_SILU_AND_MUL)
        self._rotate = called(_ROTATE)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x = _loadable(x)
        # Heads that are a view of a wider tensor stay strided; for all else the kernel for whole rows is quicker.
        heads = x.dim() == 3 and not x.is_contiguous()
        out: torch.Tensor = self._rms_norm(input=x if heads else x.reshape(-1, x.shape[-1]), weight=weight, eps=eps)
        return out.view(x.shape)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        normed, total = x.reshape(-1, x.shape[-1]), residual.reshape(-1, x.shape[-1])
        self._add_rms_norm(input=normed, residual=total, weight=weight, eps=eps)
        return normed.view(x.shape), total.view(x.shape)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        # The kernel ignores strides.
        out: torch.Tensor = self._silu_and_mul(input=gate_up.contiguous())
        return out

    def rotary_tables(self, cos: torch.Tensor, sin: torch.Tensor) -> RotaryTables:
        """Cosines and sines side by side, float32 ``[tokens, rot]``, and the row of each token, ``[tokens]``."""
        half = cos.shape[-1] // 2
        return torch.cat((cos[:, :half], sin[:, :half]), dim=-1).float(), torch.arange(len(cos), device=cos.device)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, tables: RotaryTables, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
        table, rows = tables
        turned: tuple[torch.Tensor, torch.Tensor] = self._rotate(
            positions=rows, query=_loadable(q), key=_loadable(k), head_size=q.shape[-1], cos_sin_cache=table, is_neox=not interleaved
        )
        return turned


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy if its rows are not aligned to vectors: kernels use strides and do not check alignment."""
    apart = _VECTOR_BYTES // x.element_size()
    aligned = x.stride(-1) == 1 and not any(stride % apart for stride in x.stride()[:-1]) and not x.data_ptr() % _VECTOR_BYTES
    return x if aligned else x.contiguous()


def _multiple(what: str, size: int, multiple: int) -> str:
    return f"{what} of {size}, which is no multiple of {multiple}" if size % multiple else ""


def _row_limit(need: NormNeed | GateNeed) -> str:
    return _multiple("rows", need.size, _VECTOR_BYTES // need.dtype.itemsize)


def _rotary_limit(need: RotaryNeed) -> str:
    if need.head_dim not in _ROTARY_HEADS:
        return f"heads of {need.head_dim} elements, where there is {', '.join(map(str, _ROTARY_HEADS))}"
    return _multiple("turned elements", need.rotary_dim, _ROTARY_MULTIPLE)


def _norm_modules(need: KernelNeed) -> Iterator[JitModule]:
    yield _NORM_MODULE


def _gate_modules(need: KernelNeed) -> Iterator[JitModule]:
    yield _GATE_MODULE


def _rotary_modules(need: KernelNeed) -> Iterator[JitModule]:
    yield _ROTARY_MODULE


#: What layers call, without attention.
FUNCTIONS: Mapping[str, KernelFunction] = MappingProxyType(
    {
        "rms_norm": KernelFunction((_RMS_NORM,), HALVES, CAPABILITY, _row_limit, _norm_modules),
        "add_rms_norm": KernelFunction((_ADD_RMS_NORM,), HALVES, CAPABILITY, _row_limit, _norm_modules),
        "silu_and_mul": KernelFunction((_SILU_AND_MUL,), HALVES, CAPABILITY, _row_limit, _gate_modules),
        "rotate": KernelFunction((_ROTATE,), HALVES, CAPABILITY, _rotary_limit, _rotary_modules),
    }
)
