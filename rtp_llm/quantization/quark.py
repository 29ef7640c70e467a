"""``quant_method: quark`` (AMD Quark): a global configuration, and lists of exclusions."""

from __future__ import annotations

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.scaled import FP8_DTYPES, Grid, ScaledSpec

METHOD = "quark"
_GRIDS: dict[str, Grid] = {"per_tensor": "tensor", "per_channel": "channel"}
_FP8, _INT8 = ("fp8_e4m3",), ("int8",)


def parse(fields: FieldReader) -> Declared:
    """FP8 and INT8, for each tensor or row; configurations of single layers, and two levels of scales, are not supported."""
    fields.absent("layer_quant_config", "a configuration for single layers is not supported")
    fields.absent("layer_type_quant_config", "a configuration for kinds of layers is not supported")
    overall = fields.nested("global_quant_config")
    if overall is not None and isinstance(overall.raw.get("weight"), list):
        overall.unsupported("weight", "one specification; two levels of scales are not supported")
    weight = overall.nested("weight") if overall is not None and not isinstance(overall.raw.get("weight"), list) else None
    spec = ScaledSpec("tensor")
    if weight is not None:
        kind = weight.choice("dtype", "", (*_FP8, *_INT8))
        scheme = weight.choice("qscheme", "", _GRIDS)
        if kind and scheme:
            dtypes = FP8_DTYPES[:2] if kind in _FP8 else ("int8",)
            spec = ScaledSpec(_GRIDS[scheme], dtypes, static="allowed")
        elif not fields.problems:
            weight.fail("dtype", "a dtype and a qscheme")
    elif not fields.problems:
        fields.fail("global_quant_config", "the specification of weights")
    excluded = read_names(fields, "glob", "exclude")
    fields.finish()
    return Declared(METHOD, (Group(spec),), excluded, complete=bool(excluded))
