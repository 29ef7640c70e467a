"""What is in a checkpoint directory: headers, index, catalogue. No torch.nn, no model knowledge, no torch at import."""

from rtp_llm.checkpoint.catalog import Catalog, FileInfo, TensorInfo
from rtp_llm.checkpoint.config_json import read_config, read_json_file
from rtp_llm.checkpoint.dtypes import DTYPES, DTYPES_BY_TORCH_NAME, DtypeInfo, bits_of, torch_dtype_name
from rtp_llm.checkpoint.faults import CheckpointFault
from rtp_llm.checkpoint.read import read_catalog

__all__ = [
    "DTYPES",
    "DTYPES_BY_TORCH_NAME",
    "Catalog",
    "CheckpointFault",
    "DtypeInfo",
    "FileInfo",
    "TensorInfo",
    "bits_of",
    "read_catalog",
    "read_config",
    "read_json_file",
    "torch_dtype_name",
]
