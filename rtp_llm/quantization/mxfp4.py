"""``quant_method: mxfp4``: the experts of gpt-oss, as published.

``blocks`` are uint8 ``[experts, rows, blocks, 16]`` and ``scales`` uint8 ``[experts, rows, blocks]`` of matrices ``[rows, 32 *
blocks]``, which are not transposed, unlike the plain ones; transformers' ``integrations/mxfp4.py`` reads them.
"""

from __future__ import annotations

from rtp_llm.checkpoint.fields import FieldReader
from rtp_llm.quantization.declared import Declared, Group, read_names
from rtp_llm.quantization.float4 import Float4Spec

METHOD = "mxfp4"
_SPEC = Float4Spec(32, "blocks", scale="scales", apart=True)


def parse(fields: FieldReader) -> Declared:
    """The format has no options; its list names plain modules, among them every layer but experts."""
    excluded = read_names(fields, "segments", "modules_to_not_convert")
    fields.finish()
    return Declared(METHOD, (Group(_SPEC),), excluded, complete=bool(excluded), experts_only=True)
