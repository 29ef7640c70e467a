"""Which stored dtypes a parameter may take, by name: no torch needed to plan."""

from __future__ import annotations

#: Floating-point dtypes that may be cast to one another while they are placed: safetensors' name to torch's, widest
#: significand first.  8-bit and smaller floats are quantised codes without their scales, so they are never cast.
CASTABLE = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: Bits of (significand, exponent): a cast is exact when both grow or stay.
_PRECISION = {"float64": (52, 11), "float32": (23, 8), "float16": (10, 5), "bfloat16": (7, 8)}


def cast_is_exact(source: str, target: str) -> bool:
    """Whether every value of torch dtype ``source`` survives a cast to ``target``."""
    if source == target:
        return True
    wider = source in _PRECISION and target in _PRECISION
    return wider and all(a <= b for a, b in zip(_PRECISION[source], _PRECISION[target], strict=True))


def widest(dtypes: set[str]) -> str:
    """The narrowest castable torch dtype that holds every one of ``dtypes`` exactly (float16 with bfloat16: float32).

    ``dtypes`` must be castable ones and not empty.
    """
    return next(t for t in reversed(list(_PRECISION)) if all(cast_is_exact(d, t) for d in dtypes))
