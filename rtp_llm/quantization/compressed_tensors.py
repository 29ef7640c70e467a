"""``quant_method: compressed-tensors`` (vLLM's llm-compressor): groups of modules, each with its own format."""

from __future__ import annotations

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.float4 import Float4Spec
from rtp_llm.quantization.names import Names
from rtp_llm.quantization.packed import PackedSpec
from rtp_llm.quantization.scaled import FP8_DTYPES, Grid, ScaledSpec
from rtp_llm.quantization.scheme import Spec

METHOD = "compressed-tensors"

#: Targets that mean every linear layer.
_CLASSES = frozenset({"Linear", "re:.*"})
_INT_BITS = (4, 8)
#: Block sizes of the FP4 and MX formats, which they define.
_NV_BLOCK, _MX_BLOCK = 16, 32


def parse(fields: FieldReader) -> Declared:
    """Reads every group of ``config_groups``, with its own format if it has one."""
    fields.absent("sparsity_config", "sparse weights are not supported")
    fields.absent("transform_config", "transformed weights are not supported")
    if fields.raw.get("quantization_status", "compressed") not in ("compressed", "frozen"):
        fields.unsupported("quantization_status", "compressed")
    excluded = read_names(fields, "anchored", "ignore")
    found = fields.nested("config_groups")
    if found is None:
        fields.fail("config_groups", "at least one group")
        fields.finish()
        raise AssertionError("unreachable: a problem was noted")
    named: list[Group] = []
    broad: list[Group] = []
    for key in found.raw:
        group = found.nested(key)
        if group is None:
            found.fail(key, "an object")
            continue
        spec = _spec(group, group.raw.get("format") or fields.raw.get("format"))
        targets = read_names(group, "anchored", "targets").entries or ("Linear",)
        if spec is not None:
            # Groups that name modules are tried before those that mean all.
            if _CLASSES.isdisjoint(targets):
                named.append(Group(spec, Names(targets, "anchored")))
            else:
                broad.append(Group(spec))
    if len(broad) > 1:
        fields.unsupported("config_groups", "one group at most that targets every Linear")
    fields.finish()
    return Declared(METHOD, (*named, *broad), excluded, complete=True, options=(("format", str(fields.raw.get("format"))),))


def _spec(group: FieldReader, form: object) -> Spec | None:
    """The spec of a group's weights; None, with a problem noted, if it is unknown."""
    weights = group.nested("weights")
    if weights is None:
        group.fail("weights", "an object")
        return None
    group.absent("output_activations", "quantised outputs are not supported")
    strategy = weights.choice("strategy", "tensor", ("tensor", "channel", "group", "block", "tensor_group"))
    kind = weights.choice("type", "int", ("int", "float"))
    bits = weights.integer_among("num_bits", 8, _INT_BITS)
    symmetric = weights.boolean("symmetric", True)
    size = weights.optional_integer("group_size") if strategy in ("group", "tensor_group") else None
    static = _static(group)
    spec: Spec | None = None
    if form in ("float-quantized", "naive-quantized", "mxfp8-quantized") and (kind, bits) == ("float", 8):
        spec = _float8(weights, strategy, size, static, mx=form == "mxfp8-quantized")
    elif form in ("int-quantized", "naive-quantized") and kind == "int":
        spec = _int8(weights, strategy, size, bits, symmetric, static)
    elif form == "pack-quantized" and kind == "int" and strategy in ("channel", "group"):
        if strategy == "group" and size is None:
            weights.fail("group_size", "a whole number above 0")
        ordered = weights.raw.get("actorder") in ("group", True)
        spec = PackedSpec(bits, size, symmetric, ordered)
    elif form == "nvfp4-pack-quantized" and (kind, bits, strategy, size) == ("float", 4, "tensor_group", _NV_BLOCK):
        spec = Float4Spec(_NV_BLOCK, "weight_packed", "weight_global_scale", True, "input_global_scale")
    elif form == "mxfp4-pack-quantized" and (kind, bits, strategy, size) == ("float", 4, "group", _MX_BLOCK):
        spec = Float4Spec(_MX_BLOCK, "weight_packed")
    if spec is None:
        what = f"{form} with {kind}{bits}, strategy {strategy}, group_size {size}"
        weights.unsupported(
            "strategy", "a format, a type and a strategy that go together", f"this asks for {what}; see docs/quantisation.md"
        )
    return spec


def _static(group: FieldReader) -> bool:
    """Whether activations have a scale in the checkpoint."""
    activations = group.nested("input_activations")
    if activations is None or activations.raw.get("dynamic", False) in (True, "local"):
        return False
    return not activations.raw.get("dynamic", False)


def _float8(weights: FieldReader, strategy: str, size: int | None, static: bool, *, mx: bool) -> Spec | None:
    grid: Grid
    if mx:
        return ScaledSpec((1, _MX_BLOCK), FP8_DTYPES[:1], scale_dtypes=("uint8", "float8_e8m0fnu")) if size == _MX_BLOCK else None
    if strategy == "block":
        block = weights.raw.get("block_structure")
        if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(type(n) is int and 1 < n <= 2**16 for n in block)):
            weights.fail("block_structure", "two whole numbers above 1")
            return ScaledSpec("tensor")
        grid = (block[0], block[1])
    elif strategy in ("tensor", "channel"):
        grid = "tensor" if strategy == "tensor" else "channel"
    else:
        return None
    return ScaledSpec(grid, FP8_DTYPES[:1], static="needed" if static else "none")


def _int8(weights: FieldReader, strategy: str, size: int | None, bits: int, symmetric: bool, static: bool) -> Spec | None:
    if not symmetric:
        weights.unsupported("symmetric", "true, where weights are int-quantized")
    grid: Grid
    if strategy == "group" and size is not None:
        grid = (1, size)
    elif strategy in ("tensor", "channel"):
        grid = "tensor" if strategy == "tensor" else "channel"
    else:
        return None
    return ScaledSpec(grid, ("int8",), static="needed" if static else "none", bits=bits)
