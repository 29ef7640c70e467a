"""``quant_method: fp8``: DeepSeek-V3 and Qwen (blocks), AutoFP8 (a scale for each tensor)."""

from __future__ import annotations

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.scaled import FP8_DTYPES, ScaledSpec

METHOD = "fp8"
_LISTS = ("modules_to_not_convert", "ignored_layers")


def parse(fields: FieldReader) -> Declared:
    """With ``weight_block_size`` there is a scale for each block; its name says inverse, but it multiplies.  Else there is one for
    each tensor, and another for static activations."""
    if fields.raw.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn", "e4m3fn"):
        fields.unsupported("fmt", "e4m3")
    activations = fields.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    scales = fields.raw.get("scale_fmt")
    if scales not in (None, "ue8m0", "float"):
        fields.unsupported("scale_fmt", "ue8m0 or float")
    block = fields.raw.get("weight_block_size")
    if block is None:
        static = activations == "static"
        spec = ScaledSpec("tensor", FP8_DTYPES[:2], ("weight_scale", "weight_scale_inv"), static="needed" if static else "none")
    elif (sizes := _block(block)) is not None:
        spec = ScaledSpec(sizes, FP8_DTYPES[:2], ("weight_scale_inv", "weight_scale"))
        if activations == "static":
            fields.unsupported("activation_scheme", "dynamic, where weight_block_size is given")
    else:
        fields.fail("weight_block_size", "two whole numbers above 0: rows and columns")
        spec = ScaledSpec("tensor")
    lists = read_names(fields, "segments", *_LISTS)
    fields.finish()
    options = (("activations", activations), *((("scale_fmt", str(scales)),) if scales else ()))
    return Declared(METHOD, (Group(spec),), lists, complete=bool(lists), options=options)


def _block(value: object) -> tuple[int, int] | None:
    # Blocks of one row would be groups, which this format does not have; 2**16 is larger than every published block.
    if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(n) is int and 1 < n <= 2**16 for n in value):
        return value[0], value[1]
    return None
