"""Products on quantised codes, where the device supports them; chosen once, when a layer has been loaded.

Other weights are dequantised to float32 and multiplied in the model's dtype, on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.kernels.functions import Backend, KernelFunction, Unsupported, device_facts, find_unsupported, no_kernels
from rtp_llm.kernels.needs import KernelNeed
from rtp_llm.kernels.symbols import Symbol, resolve_symbol
from rtp_llm.quantization.forms import Matrix
from rtp_llm.quantization.scaled import Scaled
from rtp_llm.quantization.scheme import Scheme, values_of

#: ``x [..., columns]`` and a bias to ``[..., rows]``.
Kernel = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]

#: The largest E4M3 number, and the least scale of activations: a row of zeros must not divide by zero.
_MAX = 448.0
_LEAST_SCALE = 1e-12
#: torch's scaled product takes rows and columns in multiples of this, from this compute capability on.
_MULTIPLE = 16
_CAPABILITY = (8, 9)


@dataclass(frozen=True, slots=True)
class ProductNeed(KernelNeed):
    """``scaled_mm`` of activations with the codes of a matrix ``[rows, columns]``."""

    rows: int
    columns: int

    @property
    def text(self) -> str:
        return f"{self.op} with a matrix of {self.rows} x {self.columns}"


def _limit(need: ProductNeed) -> str:
    odd = need.rows % _MULTIPLE or need.columns % _MULTIPLE
    return f"{need.rows} x {need.columns}, where both have to be multiples of {_MULTIPLE}" if odd else ""


_SCALED_MM = Symbol("torch", "_scaled_mm")
#: Products on codes; it gives bfloat16, so only models of that dtype have it.
PRODUCTS = Backend(
    "torch._scaled_mm", "torch", {"scaled_mm": KernelFunction((_SCALED_MM,), frozenset({torch.bfloat16}), _CAPABILITY, _limit)}, no_kernels
)


def product_need(scheme: Scheme, shape: Sequence[int], dtype: torch.dtype) -> ProductNeed | None:
    """The need of the product with codes of ``shape``; None for a scheme without one.  Only E4M3 with a scale for each tensor or
    row has one."""
    if not isinstance(scheme, Scaled) or not isinstance(scheme.grid, str) or scheme.weight.dtype != "float8_e4m3fn" or len(shape) != 2:
        return None
    return ProductNeed("scaled_mm", dtype, *shape)


def product_unsupported(need: ProductNeed, device: torch.device) -> tuple[Unsupported, ...]:
    """Why a product needs dequantised weights on ``device``; empty if it does not."""
    return find_unsupported(PRODUCTS, need, {_SCALED_MM: resolve_symbol(_SCALED_MM)}, device_facts(device))


@dataclass(frozen=True, slots=True)
class ScaledProduct:
    """``torch._scaled_mm`` on E4M3 codes ``weight [rows, columns]``, with ``scale [1, rows]`` float32.

    Activations get a scale for each token, or the ``static`` one: the largest of the fused parts, both to quantise and to
    dequantise.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    static: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.flatten(0, -2)
        if self.static is None:
            scale = (rows.abs().amax(dim=-1, keepdim=True).float() / _MAX).clamp_min_(_LEAST_SCALE)
        else:
            scale = self.static.expand(rows.shape[0], 1).contiguous()
        codes = (rows.float() / scale).clamp_(-_MAX, _MAX).to(torch.float8_e4m3fn)
        out: torch.Tensor = torch._scaled_mm(codes, self.weight.t(), scale_a=scale, scale_b=self.scale, out_dtype=torch.bfloat16)
        out = out.to(x.dtype).reshape(*x.shape[:-1], -1)
        return out if bias is None else out + bias


def product_bytes(scheme: Scheme, shape: Sequence[int]) -> int:
    """The most bytes that :func:`choose_kernel` allocates for codes of ``shape``: a float32 scale for each row, and a static one."""
    need = product_need(scheme, shape, torch.bfloat16)
    return 0 if need is None else 4 * (need.rows + 1)


def choose_kernel(
    scheme: Scheme, matrices: Sequence[Matrix], tensors: Sequence[dict[str, torch.Tensor]], weight: torch.Tensor
) -> Kernel | None:
    """The kernel for a layer's weight; None if it has to be dequantised.

    Scales of tensors become scales of rows, so fused parts keep their own.
    """
    need = product_need(scheme, weight.shape, torch.bfloat16)
    if need is None or not isinstance(scheme, Scaled) or product_unsupported(need, weight.device):
        return None
    scales = [
        values_of(parts[scheme.scale.name]).reshape(-1).expand(matrix.rows[1] - matrix.rows[0])
        for matrix, parts in zip(matrices, tensors, strict=True)
    ]
    static = None
    if scheme.static is not None:
        static = torch.stack([parts[scheme.static.name].float().reshape(()) for parts in tensors]).amax().reshape(1, 1)
    return ScaledProduct(weight, torch.cat(scales)[None].contiguous(), static)
