"""Bytes of a file as a tensor of the stored dtype."""

from __future__ import annotations

import torch

from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.checkpoint.dtypes import DTYPES
from rtp_llm.errors import TransportError, internal
from rtp_llm.plan.boxes import Box, extent, view
from rtp_llm.transport.faults import TransportFault


def as_stored(tensor: TensorInfo, box: Box, flat: torch.Tensor) -> torch.Tensor:
    """The bytes of ``box`` (``uint8``, flat) in the tensor's stored dtype, with the box's shape.

    ``flat`` holds the whole tensor where the file does not store it row-major.
    """
    name = DTYPES[tensor.dtype].torch_name
    if name is None:
        raise TransportError(
            internal(TransportFault.INTERNAL, f"the plan has a dtype that torch lacks: {tensor.dtype}", tensor=tensor.name)
        )
    dtype = getattr(torch, name)
    if flat.data_ptr() % dtype.itemsize or flat.storage_offset() % dtype.itemsize:
        # After a header of odd length, tensors lie at odd addresses, from which a device cannot load.
        flat = flat.clone()
    content = flat.view(dtype)
    return content.view(extent(box)) if tensor.strides is None else view(content.as_strided(tensor.shape, tensor.strides), box)
