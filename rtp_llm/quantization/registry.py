"""The quantisation methods, and the one that a checkpoint declares or the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.errors import Problem
from rtp_llm.quantization import awq, compressed_tensors, fp8, gptq, modelopt, mxfp4, quark
from rtp_llm.quantization.declared import Declared, declaration
from rtp_llm.quantization.faults import QuantFault, QuantizationError
from rtp_llm.quantization.inline import GRIDS

#: Keys under which ``config.json`` declares quantisation (compression_config: older compressed-tensors).
KEYS = ("quantization_config", "compression_config")
#: ModelOpt's own file.
MODELOPT_FILE = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class Method:
    """A row of the matrix that ``rtp-llm models`` and ``doctor`` print.

    ``layers``: the kinds of layers that it may quantise.  ``tensor_parallel``: conditions on the number of ranks.
    ``cpu``, ``cuda``: how the product of a linear layer is computed there (experts are dequantised, one by one).
    ``parse``: None for weights that are quantised during the load, which cannot be exported.
    """

    name: str
    schemes: str
    tensor_parallel: str
    parse: Callable[[FieldReader], Declared] | None = None
    layers: tuple[str, ...] = ("linear", "experts")
    cpu: str = "dequantised"
    cuda: str = "dequantised"
    export: bool = True


_ANY, _GROUPS = "any size", "whole groups and words"
_SCALED_MM = "scaled_mm or dequantised"

METHODS: tuple[Method, ...] = (
    Method("awq", "INT4 (GEMM)", _GROUPS, awq.parse),
    Method(
        "compressed-tensors", "FP8, MXFP8, INT8, INT4, NVFP4, MXFP4", f"{_GROUPS}; blocks: any", compressed_tensors.parse, cuda=_SCALED_MM
    ),
    Method("fp8", "FP8 a tensor or a block, UE8M0", _ANY, fp8.parse, cuda=_SCALED_MM),
    Method("gptq", "INT4, INT8, v1 and v2, desc_act", _GROUPS, gptq.parse),
    Method("modelopt", "FP8, MXFP8, NVFP4, mixed", f"{_GROUPS}; FP8: any", modelopt.parse, cuda=_SCALED_MM),
    Method("mxfp4", "MXFP4 of gpt-oss", "whole blocks", mxfp4.parse, layers=("experts",)),
    Method("quark", "FP8, INT8, a tensor or a row", _ANY, quark.parse, cuda=_SCALED_MM),
    *(Method(name, f"FP8 a {name.rpartition('-')[2]}, while loading", _ANY, cuda=_SCALED_MM, export=False) for name in GRIDS),
)

#: Methods that are known and refused, each with what to do.
_REFUSED: Mapping[str, str] = {
    "bitsandbytes": "its tensors hold tables of their own for each block; take the model's FP8, GPTQ or AWQ checkpoint",
}

BY_NAME: Mapping[str, Method] = {method.name: method for method in METHODS}


def read_declared(raw: Mapping[str, Any], own_file: Mapping[str, Any] | None, requested: str | None) -> Declared | None:
    """What ``config.json`` (``raw``) or ModelOpt's file declares; None for a plain checkpoint.

    ``requested`` is the setting: the method that the checkpoint declares, or one that quantises plain weights.

    Raises:
        QuantizationError: an unknown method, an invalid declaration, several that differ, or another one than requested; has
            all problems.
    """
    found = [_parse(fields) for fields in _declarations(raw, own_file)]
    if any(one != found[0] for one in found[1:]):
        raise QuantizationError(
            Problem(
                QuantFault.CONTRADICTION,
                "quantisation is declared more than once, and not alike",
                file="config.json",
                expected="one declaration",
                actual="; ".join(f"{one.method}: {', '.join(spec.label for spec in one.specs)}" for one in found),
            )
        )
    declared = found[0] if found else None
    wanted = None if requested in GRIDS else requested
    if requested is not None and wanted != (None if declared is None else declared.method):
        plain = f"leave the setting out, or quantise plain weights while they are loaded with {' or '.join(sorted(GRIDS))}"
        raise QuantizationError(
            Problem(
                QuantFault.CONTRADICTION,
                "--quantization is not what the checkpoint is",
                file="config.json",
                expected=requested,
                actual="no quantisation" if declared is None else declared.method,
                fix=plain if declared is None else "leave the setting out: the checkpoint says what it is",
            )
        )
    return declared


def _declarations(raw: Mapping[str, Any], own_file: Mapping[str, Any] | None) -> Iterator[FieldReader]:
    places = [("", raw)]
    nested = raw.get("text_config")
    if isinstance(nested, Mapping):
        places.append(("text_config.", nested))
    for prefix, part in places:
        for key in KEYS:
            value = part.get(key)
            if isinstance(value, Mapping) and value:
                yield declaration(value, "config.json", f"{prefix}{key}.")
            elif value:
                yield declaration({"quant_method": value}, "config.json", f"{prefix}{key}.")
    if own_file is not None:
        yield declaration({"quant_method": "modelopt", **own_file}, MODELOPT_FILE, "")


def _parse(fields: FieldReader) -> Declared:
    name = fields.raw.get("quant_method")
    if name is None and "quant_algo" in fields.raw:
        name = "modelopt"
    if name is None and "config_groups" in fields.raw:
        name = "compressed-tensors"
    method = BY_NAME.get(name) if isinstance(name, str) else None
    if method is None or method.parse is None:
        known = sorted(m.name for m in METHODS if m.parse is not None)
        fix = _REFUSED.get(name) if isinstance(name, str) else None
        fault = QuantFault.UNKNOWN_METHOD if fix is None else QuantFault.UNSUPPORTED_SCHEME
        fields.fail("quant_method", f"one of {', '.join(known)}", fault=fault, fix=fix or "use another checkpoint of this model")
        fields.finish()
        raise AssertionError("unreachable: a problem was noted")
    return method.parse(fields)
