"""``quant_method: modelopt`` (NVIDIA ModelOpt), in ``config.json`` or in its own file."""

from __future__ import annotations

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.float4 import Float4Spec
from rtp_llm.quantization.names import Names
from rtp_llm.quantization.scaled import FP8_DTYPES, ScaledSpec
from rtp_llm.quantization.scheme import Spec

METHOD = "modelopt"
_MIXED = "mixed_precision"

#: The spec of each algorithm.
_ALGORITHMS: dict[str, Spec] = {
    "fp8": ScaledSpec("tensor", FP8_DTYPES[:1], static="allowed"),
    "fp8_per_channel_per_token": ScaledSpec("channel", FP8_DTYPES[:1]),
    "nvfp4": Float4Spec(16, "weight", "weight_scale_2", False, "input_scale"),
    "w4a16_nvfp4": Float4Spec(16, "weight", "weight_scale_2", False, "input_scale"),
    "mxfp8": ScaledSpec((1, 32), FP8_DTYPES[:1], scale_dtypes=("uint8", "float8_e8m0fnu")),
}


def parse(fields: FieldReader) -> Declared:
    """The algorithm is under ``quantization`` in its own file, and at the top in ``config.json``; a mixed one names one for each
    layer."""
    nested = fields.nested("quantization") or fields
    algorithm = nested.choice("quant_algo", "", (*_ALGORITHMS, _MIXED))
    groups: list[Group] = []
    if algorithm == _MIXED:
        layers = nested.nested("quantized_layers")
        by_algorithm: dict[str, list[str]] = {}
        for name in layers.raw if layers is not None else ():
            assert layers is not None
            own = layers.nested(name)
            if own is not None:
                by_algorithm.setdefault(own.choice("quant_algo", "", _ALGORITHMS), []).append(name)
        groups = [Group(_ALGORITHMS[key], Names(tuple(names), "glob")) for key, names in by_algorithm.items() if key]
        if not groups:
            nested.fail("quantized_layers", "the algorithm of at least one layer")
    elif algorithm:
        groups = [Group(_ALGORITHMS[algorithm])]
    elif "quant_algo" not in nested.raw:
        nested.fail("quant_algo", f"one of {', '.join(sorted(_ALGORITHMS))}")
    excluded = read_names(nested, "glob", "exclude_modules", "ignore")
    fields.finish()
    return Declared(METHOD, tuple(groups), excluded, complete=bool(excluded), options=(("quant_algo", algorithm),))
