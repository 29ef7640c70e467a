"""Everything that can be wrong with the files of a checkpoint."""

from __future__ import annotations

from enum import Enum


class CheckpointFault(Enum):
    """Faults of files.  Those of the last group are notes: they are reported and do not forbid loading."""

    # The directory and its files
    NO_DIRECTORY = "the directory does not exist"
    NOT_A_DIRECTORY = "the path is not a directory"
    NO_WEIGHTS = "the directory holds no file of weights that can be loaded"
    AMBIGUOUS_FILES = "several sets of weights could be meant"
    NOT_A_FILE = "a name that should be a file is a directory, pipe, socket or device"
    DANGLING_LINK = "a symbolic link leads nowhere"
    UNREADABLE = "the operating system refuses to read"
    GIT_LFS_POINTER = "the file is a Git LFS pointer, not the weights"

    # One safetensors file
    TRUNCATED_FILE = "the file ends before its data does"
    TRAILING_BYTES = "the file goes on after its data"
    HEADER_BEYOND_FILE = "the header is said to be longer than the file"
    HEADER_TOO_LARGE = "the header is longer than the format allows"
    BAD_HEADER = "the header is not the JSON object that the format asks for"
    BAD_METADATA = "__metadata__ is not a map from strings to strings"
    BAD_ENTRY = "a tensor's header entry is not {dtype, shape, data_offsets}"
    BAD_NAME = "a name is empty, too long, or holds control characters"
    UNKNOWN_DTYPE = "the dtype is not one that can be read"
    BAD_SHAPE = "a shape is not a short list of sizes"
    BAD_OFFSETS = "data_offsets are not two ordered positions"
    OVERFLOW = "a size or position does not fit 63 bits"
    SIZE_MISMATCH = "dtype and shape ask for another number of bytes than data_offsets give"
    OVERLAP = "two tensors share bytes"
    GAP = "bytes belong to no tensor"
    DUPLICATE_KEY = "a JSON object holds the same key twice"
    TOO_MANY_TENSORS = "more tensors than any real checkpoint has"
    TOO_MANY_PROBLEMS = "the rest of the file was not looked at"

    # Index and shards
    BAD_INDEX = "the index is not a map from tensors to files"
    UNSAFE_FILE_NAME = "the index names something that is not a plain file name"
    SHARD_ABSENT = "a shard is not there"
    TENSOR_ABSENT = "a tensor is not in the file that should hold it"
    DUPLICATE_TENSOR = "two files hold a tensor of the same name"

    # torch files
    NOT_AN_ARCHIVE = "the file is not an archive that torch.save writes"
    BAD_ARCHIVE = "the archive's directory contradicts the file"
    COMPRESSED_ARCHIVE = "the archive holds compressed records"
    BIG_ENDIAN = "the file was written on a big-endian machine"
    LEGACY_PICKLE = "the file has torch's format of before version 1.6"
    UNSAFE_PICKLE = "the pickle asks for code to be run"
    BAD_PICKLE = "the pickle does not describe a state dict"
    UNSUPPORTED_TENSOR = "a tensor of a kind that cannot be read by byte range"

    # JSON files beside the weights
    NO_CONFIG = "config.json is not there"
    BAD_JSON = "the file is not a JSON object that can be trusted"
    NO_ARCHITECTURE = "config.json does not name the model's architecture"

    # Notes
    OUTSIDE_INDEX = "tensors that the index does not name are ignored"
    STRAY_FILE = "a file of weights that is no part of this checkpoint is ignored"
    NO_INDEX = "shards without an index; their names decide"
    NOT_A_TENSOR = "an entry that is not a tensor is ignored"
    NESTED_STATE_DICT = "the state dict lies inside another dict"
