"""Formats of compressed-tensors: its own compressors write, and its own decompressors say what was written."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from tests.quantization.formats import E2M1, FORMATS, Format, Tensors, blocks


def compressed(preset: str, form: str, group: int | None = None) -> Format:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    if group is not None:
        args.group_size = group
    codec = BaseCompressor.get_value_from_registry(form)

    def encode(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        least, most = _extremes(weight, str(getattr(args.strategy, "value", args.strategy)), args.group_size, args.block_structure)
        state = {"weight": weight}
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
        scale, zero = calculate_qparams(least, most, args, global_scale=state.get("weight_global_scale"))
        tensors = codec.compress({**state, "weight_scale": scale, "weight_zero_point": zero}, scheme)
        tensors = {name: value.to(torch.uint8) if value.dtype == torch.uint8 else value for name, value in tensors.items()}
        dense = codec.decompress(dict(tensors), scheme)["weight"]
        if dense.dtype == torch.bfloat16:
            # It decodes FP4 and MX to bfloat16 alone: the formula in float64 is held against that, and then taken.
            exact = _unrounded(tensors, group or args.group_size)
            assert torch.allclose(exact, dense.float(), rtol=2**-7, atol=0)
            dense = exact
        return dict(tensors) | _static(config), dense

    dumped = scheme.model_dump(mode="json")
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": dumped},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
    }
    return Format(config, encode, "compressed-tensors")


def _unrounded(tensors: Mapping[str, torch.Tensor], group: int) -> torch.Tensor:
    if "weight" in tensors:
        codes = tensors["weight"].double()
    else:
        pairs = tensors["weight_packed"].long()
        codes = E2M1[torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)]
    scale = tensors["weight_scale"]
    wide = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double() / tensors["weight_global_scale"].double()
    return (codes * wide.repeat_interleave(group, 1)).float()


def _static(config: dict[str, Any]) -> Tensors:
    """A scale of activations where they are static; weights do not depend on it."""
    activations = config["config_groups"]["group_0"]["input_activations"]
    static = activations is not None and activations["dynamic"] is False
    return {"input_scale": torch.tensor([0.02])} if static else {}


def _extremes(weight: torch.Tensor, strategy: str, group: int | None, block: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if strategy in ("group", "tensor_group"):
        groups = weight.unflatten(1, (-1, group))
        return groups.amin(-1), groups.amax(-1)
    if strategy == "channel":
        return weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    if strategy == "block":
        largest = blocks(weight, tuple(block))
        return -largest, largest
    return weight.amin().reshape(1), weight.amax().reshape(1)


#: Preset, format and group size.  The library needs Python 3.11.
_COMPRESSED: dict[str, tuple[str, str, int | None]] = {
    "ct-fp8-static": ("FP8", "float-quantized", None),
    "ct-fp8-channel": ("FP8_DYNAMIC", "float-quantized", None),
    "ct-fp8-block": ("FP8_BLOCK", "float-quantized", None),
    "ct-mxfp8": ("MXFP8", "mxfp8-quantized", None),
    "ct-w8a8": ("W8A8", "int-quantized", None),
    "ct-w4a8": ("W4A8", "int-quantized", 32),
    "ct-w4a16": ("W4A16", "pack-quantized", 32),
    "ct-w4a16-asym": ("W4A16_ASYM", "pack-quantized", 32),
    "ct-w8a16": ("W8A16", "pack-quantized", 32),
    "ct-nvfp4": ("NVFP4", "nvfp4-pack-quantized", None),
    "ct-mxfp4": ("MXFP4", "mxfp4-pack-quantized", None),
}

#: All formats.
EVERY: Mapping[str, Format] = {
    **{name: compressed(*args) for name, args in _COMPRESSED.items() if sys.version_info >= (3, 11)},
    **FORMATS,
}
