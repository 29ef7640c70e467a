"""Element types that safetensors knows, and what torch calls them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """One element type: safetensors' name, bits for each element of a header's shape, and torch's name.

    ``torch_name`` is None where torch has no such type.  ``packed`` is the number of shape elements in one torch
    element: 2 for ``F4``, whose torch type holds a pair in a byte, so that torch's last dimension is half as long.
    """

    name: str
    bits: int
    torch_name: str | None
    packed: int = 1


_ROWS = (
    DtypeInfo("BOOL", 8, "bool"),
    DtypeInfo("F4", 4, "float4_e2m1fn_x2", packed=2),
    DtypeInfo("F6_E2M3", 6, None),
    DtypeInfo("F6_E3M2", 6, None),
    DtypeInfo("U8", 8, "uint8"),
    DtypeInfo("I8", 8, "int8"),
    DtypeInfo("F8_E5M2", 8, "float8_e5m2"),
    DtypeInfo("F8_E4M3", 8, "float8_e4m3fn"),
    DtypeInfo("F8_E8M0", 8, "float8_e8m0fnu"),
    DtypeInfo("F8_E4M3FNUZ", 8, "float8_e4m3fnuz"),
    DtypeInfo("F8_E5M2FNUZ", 8, "float8_e5m2fnuz"),
    DtypeInfo("I16", 16, "int16"),
    DtypeInfo("U16", 16, "uint16"),
    DtypeInfo("F16", 16, "float16"),
    DtypeInfo("BF16", 16, "bfloat16"),
    DtypeInfo("I32", 32, "int32"),
    DtypeInfo("U32", 32, "uint32"),
    DtypeInfo("F32", 32, "float32"),
    DtypeInfo("C64", 64, "complex64"),
    DtypeInfo("F64", 64, "float64"),
    DtypeInfo("I64", 64, "int64"),
    DtypeInfo("U64", 64, "uint64"),
)

#: By safetensors' name; the list of safetensors 0.8 (``Dtype`` in its ``tensor.rs``).
DTYPES: dict[str, DtypeInfo] = {row.name: row for row in _ROWS}

#: By torch's name (``bfloat16``, without ``torch.``).
DTYPES_BY_TORCH_NAME: dict[str, DtypeInfo] = {row.torch_name: row for row in _ROWS if row.torch_name}


def bits_of(dtype: str) -> int:
    """Bits of one element of safetensors' ``dtype``; KeyError for a name that the format does not know."""
    return DTYPES[dtype].bits


def torch_dtype_name(dtype: str) -> str | None:
    """``BF16`` -> ``bfloat16``; None where torch has no such type; KeyError for a name that the format does not know."""
    return DTYPES[dtype].torch_name
