"""Makes every hostile, broken or misleading checkpoint that the catalogue has to withstand.

Each function fills an empty directory; its docstring says what is attacked.  ``ATTACKS`` says what must come of it:
the fault, the file and the tensor that the report names, and whether the load is refused or goes on with a note.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtp_llm.checkpoint import CheckpointFault as F
from tests.support.sparse import write_sparse_checkpoint, write_sparse_file

#: The smallest Llama: what every attack starts from, so that nothing but the attack is wrong.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "vocab_size": 16,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
TENSORS: dict[str, tuple[str, tuple[int, ...]]] = {
    "lm_head.weight": ("F32", (16, 8)),
    "model.embed_tokens.weight": ("F32", (16, 8)),
    "model.layers.0.input_layernorm.weight": ("F32", (8,)),
    "model.layers.0.mlp.down_proj.weight": ("F32", (8, 16)),
    "model.layers.0.mlp.gate_proj.weight": ("F32", (16, 8)),
    "model.layers.0.mlp.up_proj.weight": ("F32", (16, 8)),
    "model.layers.0.post_attention_layernorm.weight": ("F32", (8,)),
    "model.layers.0.self_attn.k_proj.weight": ("F32", (4, 8)),
    "model.layers.0.self_attn.o_proj.weight": ("F32", (8, 8)),
    "model.layers.0.self_attn.q_proj.weight": ("F32", (8, 8)),
    "model.layers.0.self_attn.v_proj.weight": ("F32", (4, 8)),
    "model.norm.weight": ("F32", (8,)),
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
BIN = "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class Attack:
    """One hostile directory and what must be said of it."""

    name: str
    make: Callable[[Path], Path | None]
    fault: F | None
    file: str | None = None
    tensor: str | None = None
    #: ``problem``: refused.  ``note``: loads, and is reported.  ``config``: only ``config.json`` is wrong.  ``fine``: nothing is wrong.
    outcome: str = "problem"

    def build(self, directory: Path) -> Path:
        """Make the attack in ``directory``; returns the path to give to the program."""
        directory.mkdir(parents=True, exist_ok=True)
        return self.make(directory) or directory


ATTACKS: list[Attack] = []


def attack(
    fault: F | None, file: str | None = None, tensor: str | None = None, outcome: str = "problem"
) -> Callable[[Callable[[Path], Path | None]], Callable[[Path], Path | None]]:
    def register(make: Callable[[Path], Path | None]) -> Callable[[Path], Path | None]:
        assert make.__doc__, make.__name__
        ATTACKS.append(Attack(make.__name__, make, fault, file, tensor, outcome))
        return make

    return register


# ---------------------------------------------------------------------------------------------- tools


def good_single(d: Path) -> None:
    write_sparse_checkpoint(d, TENSORS, 1, CONFIG)


def good_sharded(d: Path) -> None:
    write_sparse_checkpoint(d, TENSORS, 2, CONFIG)


def craft(path: Path, header: object, data: int = 0, length: int | None = None) -> None:
    """A file with this header (an object for JSON, or raw bytes), ``data`` zero bytes, and maybe a false length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(raw) if length is None else length) + raw)
    os.truncate(path, 8 + len(raw) + data)


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def with_config(d: Path) -> Path:
    (d / "config.json").write_text(json.dumps(CONFIG))
    return d / SINGLE


def one_entry(d: Path, value: object, data: int = 4, name: str = "w") -> None:
    craft(with_config(d), {name: value}, data)


def edit_index(d: Path, change: Callable[[dict[str, Any]], None]) -> None:
    good_sharded(d)
    index = json.loads((d / INDEX).read_text())
    change(index["weight_map"])
    (d / INDEX).write_text(json.dumps(index))


def redirect(d: Path, target: object) -> None:
    edit_index(d, lambda weight_map: weight_map.update({"model.norm.weight": target}))


# ---------------------------------------------------------------------------------------------- sizes


@attack(F.TRUNCATED_FILE, SINGLE, "model.norm.weight")
def truncated(d: Path) -> None:
    """The download stopped one byte before the end."""
    good_single(d)
    os.truncate(d / SINGLE, (d / SINGLE).stat().st_size - 1)


@attack(F.TRUNCATED_FILE, SINGLE)
def empty_file(d: Path) -> None:
    """A file of no bytes at all."""
    with_config(d).write_bytes(b"")


@attack(F.TRUNCATED_FILE, SINGLE)
def seven_bytes(d: Path) -> None:
    """A file too short for the header's length."""
    with_config(d).write_bytes(b"\0" * 7)


@attack(F.HEADER_BEYOND_FILE, SINGLE)
def header_cut(d: Path) -> None:
    """The download stopped inside the header."""
    good_single(d)
    os.truncate(d / SINGLE, 100)


@attack(F.TRAILING_BYTES, SINGLE)
def trailing(d: Path) -> None:
    """Bytes after the last tensor, where a second file can hide."""
    good_single(d)
    with open(d / SINGLE, "ab") as stream:
        stream.write(b"PK\x03\x04hidden")


@attack(F.HEADER_BEYOND_FILE, SINGLE)
def header_length_beyond_file(d: Path) -> None:
    """A header length that would make a reader allocate a gigabyte."""
    craft(with_config(d), b"{}", length=1 << 30)


@attack(F.HEADER_BEYOND_FILE, SINGLE)
def header_length_2_63(d: Path) -> None:
    """A header length that overflows a signed 64-bit integer."""
    craft(with_config(d), b"{}", length=1 << 63)


@attack(F.HEADER_TOO_LARGE, SINGLE)
def header_length_200_mb(d: Path) -> None:
    """A header over the format's 100 MB limit, in a sparse file that is long enough for it."""
    craft(with_config(d), b"{}", data=200_000_000, length=200_000_000)


@attack(F.BAD_ENTRY, SINGLE, "a")
def header_of_brackets(d: Path) -> None:
    """99 MB of ``[`` as a tensor's entry: recursion in a JSON parser."""
    craft(with_config(d), b'{"a":' + b"[" * 99_000_000)


@attack(F.BAD_ENTRY, SINGLE, "a")
def header_of_empty_lists(d: Path) -> None:
    """99 MB of ``[],``: two gigabytes of lists if the header is parsed as one value."""
    craft(with_config(d), b'{"a":{"x":[' + b"[]," * 33_000_000)


@attack(F.BAD_METADATA, SINGLE, "__metadata__")
def metadata_of_empty_lists(d: Path) -> None:
    """The same in ``__metadata__``, whose length has no bound of its own."""
    craft(with_config(d), b'{"__metadata__":{"x":[' + b"[]," * 20_000_000)


@attack(F.BAD_HEADER, SINGLE)
def header_of_one_string(d: Path) -> None:
    """A name of 90 MB that never ends."""
    craft(with_config(d), b'{"' + b"x" * 90_000_000)


@attack(F.BAD_HEADER, SINGLE)
def header_of_spaces(d: Path) -> None:
    """A header of 90 MB of white space."""
    craft(with_config(d), b" " * 90_000_000)


@attack(F.TOO_MANY_PROBLEMS, SINGLE)
def million_bad_entries(d: Path) -> None:
    """A million faulty entries: a report of all of them would fill memory."""
    body = ",".join(f'"t{i}":{{}}' for i in range(1_000_000))
    craft(with_config(d), ("{" + body + "}").encode())


@attack(F.TOO_MANY_TENSORS, SINGLE)
def million_empty_tensors(d: Path) -> None:
    """A million valid entries of tensors without data: minutes of planning for a file of 60 MB."""
    body = ",".join(f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(1_000_000))
    craft(with_config(d), ("{" + body + "}").encode())


@attack(F.TOO_MANY_TENSORS, SINGLE)
def million_tensors_spelled_oddly(d: Path) -> None:
    """The same with a field's name in escapes, so that a search for it finds none."""
    body = ",".join(f'"t{i}":{{"dtype":"U8","shape":[0],"data_offset\\u0073":[0,0]}}' for i in range(1_000_000))
    craft(with_config(d), ("{" + body + "}").encode())


@attack(F.TOO_MANY_PROBLEMS, SINGLE)
def millions_of_metadata(d: Path) -> None:
    """``__metadata__`` five million times: each but the first is a name that stands twice."""
    craft(with_config(d), b"{" + b'"__metadata__":{},' * 5_000_000 + b'"a":0}')


@attack(F.HEADER_TOO_LARGE, SINGLE)
def wide_header(d: Path) -> None:
    """98 MB of metadata with one emoji, for which Python would take four bytes for each character."""
    craft(with_config(d), ('{"__metadata__":{"a":"' + "x" * 98_000_000 + '\N{SNAKE}"}}').encode())


@attack(F.BAD_HEADER, SINGLE)
def escaped_wide_metadata(d: Path) -> None:
    """The same in ASCII, with an escape for the emoji."""
    craft(with_config(d), b'{"__metadata__":{"a":"' + b"x" * 98_000_000 + b'\\ud83d\\udc0d"}}')


@attack(F.BAD_HEADER, SINGLE)
def metadata_of_escaped_quotes(d: Path) -> None:
    """Nothing but escaped quotes: each could be the string's end."""
    craft(with_config(d), b'{"__metadata__":{"a":"' + b'\\"' * 45_000_000 + b'"}}')


@attack(F.TOO_MANY_PROBLEMS, "model-00003-of-00500.safetensors")
def many_bad_shards(d: Path) -> None:
    """Five hundred shards of nothing but faults."""
    with_config(d)
    body = json.dumps({f"t{i}": {} for i in range(400)}).encode()
    for n in range(1, 501):
        craft(d / f"model-{n:05d}-of-00500.safetensors", body)


# ---------------------------------------------------------------------------------------------- header JSON


@attack(F.BAD_HEADER, SINGLE)
def not_json(d: Path) -> None:
    """A header that is not JSON."""
    craft(with_config(d), b"not json at all")


@attack(F.BAD_HEADER, SINGLE)
def header_is_list(d: Path) -> None:
    """A header that is JSON and no object."""
    craft(with_config(d), [1, 2, 3])


@attack(F.BAD_HEADER, SINGLE)
def not_utf8(d: Path) -> None:
    """Bytes that are not UTF-8."""
    craft(with_config(d), b'{"\xff\xfe":{}}')


@attack(F.BAD_HEADER, SINGLE)
def text_after_object(d: Path) -> None:
    """A second object behind the first, which one reader sees and another does not."""
    craft(with_config(d), b'{}{"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1)


@attack(F.DUPLICATE_KEY, SINGLE, "w")
def duplicate_key(d: Path) -> None:
    """One name twice with different bytes: JSON parsers disagree which one counts."""
    a, b = (json.dumps(entry("U8", [4], [n, n + 4])) for n in (0, 4))
    craft(with_config(d), f'{{"w":{a},"w":{b}}}'.encode(), 8)


@attack(F.BAD_ENTRY, SINGLE, "w")
def duplicate_field(d: Path) -> None:
    """A shape given twice inside one entry."""
    craft(with_config(d), b'{"w":{"dtype":"U8","shape":[4],"shape":[2,2],"data_offsets":[0,4]}}', 4)


@attack(F.BAD_ENTRY, SINGLE, "w")
def unknown_field(d: Path) -> None:
    """A field that could change what the bytes mean."""
    one_entry(d, entry("U8", [4], [0, 4]) | {"compression": "zstd"})


@attack(F.BAD_ENTRY, SINGLE, "w")
def entry_without_dtype(d: Path) -> None:
    """A field is absent."""
    one_entry(d, {"shape": [4], "data_offsets": [0, 4]})


@attack(F.BAD_ENTRY, SINGLE, "w")
def entry_is_string(d: Path) -> None:
    """An entry that is no object."""
    one_entry(d, "F32")


@attack(F.BAD_ENTRY, SINGLE, "w")
def deeply_nested_entry(d: Path) -> None:
    """Two thousand levels inside an entry of legal length."""
    craft(with_config(d), b'{"w":{"dtype":"U8","shape":' + b"[" * 2000 + b"]" * 2000 + b',"data_offsets":[0,4]}}', 4)


@attack(F.BAD_ENTRY, SINGLE, "w")
def nested_object(d: Path) -> None:
    """An object inside an entry."""
    one_entry(d, entry("U8", [4], [0, 4]) | {"more": {"x": 1}})


@attack(F.BAD_METADATA, SINGLE, "__metadata__")
def metadata_is_list(d: Path) -> None:
    """``__metadata__`` of the wrong type."""
    craft(with_config(d), {"__metadata__": [1]})


@attack(F.BAD_METADATA, SINGLE, "__metadata__")
def metadata_number(d: Path) -> None:
    """A value of ``__metadata__`` that is no string."""
    craft(with_config(d), {"__metadata__": {"format": 1}, "w": entry("U8", [4], [0, 4])}, 4)


@attack(F.BAD_METADATA, SINGLE, "__metadata__")
def metadata_as_tensor(d: Path) -> None:
    """A tensor called ``__metadata__``."""
    one_entry(d, entry("U8", [4], [0, 4]), name="__metadata__")


# ---------------------------------------------------------------------------------------------- entries


@attack(F.UNKNOWN_DTYPE, SINGLE, "w")
def unknown_dtype(d: Path) -> None:
    """A dtype that nobody knows."""
    one_entry(d, entry("F3", [4], [0, 4]))


@attack(F.UNKNOWN_DTYPE, SINGLE, "w")
def dtype_is_list(d: Path) -> None:
    """A dtype that cannot be looked up in a table."""
    one_entry(d, entry(["U8"], [4], [0, 4]))


@attack(F.BAD_SHAPE, SINGLE, "w")
def negative_shape(d: Path) -> None:
    """Two negative sizes whose product is positive."""
    one_entry(d, entry("U8", [-2, -2], [0, 4]))


@attack(F.BAD_SHAPE, SINGLE, "w")
def bool_shape(d: Path) -> None:
    """``true`` equals 1 in Python."""
    one_entry(d, entry("U8", [True, 4], [0, 4]))


@attack(F.BAD_SHAPE, SINGLE, "w")
def float_shape(d: Path) -> None:
    """4.0 equals 4 in Python."""
    one_entry(d, entry("U8", [4.0], [0, 4]))


@attack(F.BAD_SHAPE, SINGLE, "w")
def huge_rank(d: Path) -> None:
    """A thousand dimensions of size 1."""
    one_entry(d, entry("U8", [1] * 1000, [0, 1]), data=1)


@attack(F.BAD_OFFSETS, SINGLE, "w")
def float_offsets(d: Path) -> None:
    """Positions that are no whole numbers."""
    one_entry(d, entry("U8", [4], [0.0, 4.0]))


@attack(F.BAD_OFFSETS, SINGLE, "w")
def nan_offsets(d: Path) -> None:
    """NaN, which Python's JSON parser accepts and which compares to nothing."""
    craft(with_config(d), b'{"w":{"dtype":"U8","shape":[4],"data_offsets":[NaN,NaN]}}', 4)


@attack(F.BAD_OFFSETS, SINGLE, "w")
def unordered_offsets(d: Path) -> None:
    """A range that ends before it starts."""
    one_entry(d, entry("U8", [4], [4, 0]))


@attack(F.BAD_OFFSETS, SINGLE, "w")
def negative_offset(d: Path) -> None:
    """A range that starts before the data, inside the header."""
    one_entry(d, entry("U8", [4], [-4, 0]))


@attack(F.BAD_OFFSETS, SINGLE, "w")
def three_offsets(d: Path) -> None:
    """A range of three ends."""
    one_entry(d, entry("U8", [4], [0, 4, 8]))


@attack(F.OVERFLOW, SINGLE, "w")
def offsets_2_63(d: Path) -> None:
    """A length of 2**63 bytes that matches its shape."""
    one_entry(d, entry("U8", [2**63], [0, 2**63]))


@attack(F.OVERFLOW, SINGLE, "w")
def shape_overflow(d: Path) -> None:
    """Sizes whose product is 2**64, which is 0 in 64 bits."""
    one_entry(d, entry("U8", [2**32, 2**32], [0, 0]), data=0)


@attack(F.OVERFLOW, SINGLE, "w")
def overflow_hidden_by_zero(d: Path) -> None:
    """An empty tensor whose other sizes overflow."""
    one_entry(d, entry("U8", [2**40, 0, 2**40], [0, 0]), data=0)


@attack(F.SIZE_MISMATCH, SINGLE, "w")
def size_mismatch(d: Path) -> None:
    """dtype x shape asks for more bytes than the range has."""
    one_entry(d, entry("F32", [4], [0, 4]))


@attack(F.SIZE_MISMATCH, SINGLE, "w")
def half_a_byte(d: Path) -> None:
    """Three four-bit numbers, which end in the middle of a byte."""
    one_entry(d, entry("F4", [3], [0, 2]), data=2)


@attack(F.OVERLAP, SINGLE, "b")
def overlapping(d: Path) -> None:
    """Two tensors that share bytes."""
    craft(with_config(d), {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [2, 6])}, 6)


@attack(F.OVERLAP, SINGLE, "b")
def same_range(d: Path) -> None:
    """Two names for one range: a small file that claims any amount of memory."""
    craft(with_config(d), {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [0, 4])}, 4)


@attack(F.GAP, SINGLE, "b")
def gap(d: Path) -> None:
    """Bytes between tensors, where a payload can hide."""
    craft(with_config(d), {"a": entry("U8", [4], [0, 4]), "b": entry("U8", [4], [8, 12])}, 12)


@attack(F.GAP, SINGLE, "w")
def gap_at_start(d: Path) -> None:
    """Bytes before the first tensor."""
    one_entry(d, entry("U8", [4], [4, 8]), data=8)


@attack(F.NO_WEIGHTS, SINGLE)
def no_tensors(d: Path) -> None:
    """A valid file with nothing in it."""
    craft(with_config(d), {})


# ---------------------------------------------------------------------------------------------- names


@attack(F.BAD_NAME, SINGLE, r"\x1b[2J\x1b[31mok")
def terminal_escape_name(d: Path) -> None:
    """A name that clears the terminal when it is printed."""
    one_entry(d, entry("U8", [4], [0, 4]), name="\x1b[2J\x1b[31mok")


@attack(F.BAD_NAME, SINGLE, r"a\nb")
def newline_name(d: Path) -> None:
    """A name that forges a line of a log."""
    one_entry(d, entry("U8", [4], [0, 4]), name="a\nb")


@attack(F.BAD_NAME, SINGLE, r"\ud800")
def surrogate_name(d: Path) -> None:
    """Half a UTF-16 pair, which cannot be printed as UTF-8."""
    craft(with_config(d), b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4)


@attack(F.BAD_NAME, SINGLE, r"a\u202eb")
def bidirectional_name(d: Path) -> None:
    """A mark that makes the rest of the line read backwards."""
    one_entry(d, entry("U8", [4], [0, 4]), name="a\u202eb")


@attack(F.BAD_NAME, SINGLE, "")
def empty_name(d: Path) -> None:
    """A name of no characters."""
    one_entry(d, entry("U8", [4], [0, 4]), name="")


@attack(F.BAD_NAME, SINGLE)
def long_name(d: Path) -> None:
    """A name of a megabyte, which must not fill the screen."""
    one_entry(d, entry("U8", [4], [0, 4]), name="x" * 1_000_000)


# ---------------------------------------------------------------------------------------------- index and shards


@attack(F.SHARD_ABSENT, SHARDS[1])
def absent_shard(d: Path) -> None:
    """The index names a shard that was not downloaded."""
    good_sharded(d)
    (d / SHARDS[1]).unlink()


@attack(F.SHARD_ABSENT, "model-00002-of-00003.safetensors")
def absent_shard_without_index(d: Path) -> None:
    """Shards say that there are three of them, and two are there."""
    good_sharded(d)
    (d / INDEX).unlink()
    (d / SHARDS[0]).rename(d / "model-00001-of-00003.safetensors")
    (d / SHARDS[1]).rename(d / "model-00003-of-00003.safetensors")


@attack(F.TENSOR_ABSENT, SHARDS[1], "model.extra.weight")
def tensor_absent(d: Path) -> None:
    """The index names a tensor that its shard does not hold."""
    edit_index(d, lambda weight_map: weight_map.update({"model.extra.weight": SHARDS[1]}))


@attack(F.TENSOR_ABSENT, SHARDS[0], "model.norm.weight")
def tensor_in_other_shard(d: Path) -> None:
    """A stale index: the tensor lies in another shard now."""
    redirect(d, SHARDS[0])


@attack(F.DUPLICATE_TENSOR, SHARDS[1], "lm_head.weight")
def duplicate_over_shards(d: Path) -> None:
    """Two shards hold one name, and no index says which counts."""
    good_sharded(d)
    (d / INDEX).unlink()
    second = {n: t for n, t in TENSORS.items() if n not in list(TENSORS)[:6]}
    write_sparse_file(d / SHARDS[0], dict(list(TENSORS.items())[:6]))
    write_sparse_file(d / SHARDS[1], second | {"lm_head.weight": TENSORS["lm_head.weight"]})


@attack(F.OUTSIDE_INDEX, SHARDS[1], "model.layers.9.stale.weight", outcome="note")
def tensors_outside_index(d: Path) -> None:
    """A shard reused from another export holds tensors that the index does not name; they must not be loaded."""
    good_sharded(d)
    held = {n for n, f in json.loads((d / INDEX).read_text())["weight_map"].items() if f == SHARDS[1]}
    tensors = {n: t for n, t in TENSORS.items() if n in held}
    write_sparse_file(d / SHARDS[1], tensors | {"model.layers.9.stale.weight": ("F32", (8,))})


@attack(F.OUTSIDE_INDEX, SHARDS[1], "lm_head.weight", outcome="note")
def copy_outside_index(d: Path) -> None:
    """A stale copy of a tensor in a second shard; the index names the first."""
    good_sharded(d)
    held = {n for n, f in json.loads((d / INDEX).read_text())["weight_map"].items() if f == SHARDS[1]}
    tensors = {n: t for n, t in TENSORS.items() if n in held}
    write_sparse_file(d / SHARDS[1], tensors | {"lm_head.weight": ("F32", (1, 1))})


@attack(F.STRAY_FILE, "consolidated.safetensors", outcome="note")
def consolidated_beside_shards(d: Path) -> None:
    """The vendor's own file beside the shards holds every weight a second time."""
    good_sharded(d)
    write_sparse_file(d / "consolidated.safetensors", {"layers.0.attention.wq.weight": ("F32", (8, 8))})


@attack(F.STRAY_FILE, "consolidated.safetensors", outcome="note")
def garbage_consolidated(d: Path) -> None:
    """A stray file that is broken must not matter: it is never opened."""
    good_single(d)
    (d / "consolidated.safetensors").write_bytes(b"\xff" * 64)


@attack(F.STRAY_FILE, SINGLE, outcome="note")
def single_beside_shards(d: Path) -> None:
    """A single file of another export beside indexed shards."""
    good_sharded(d)
    write_sparse_file(d / SINGLE, {"lm_head.weight": ("F32", (1, 1))})


@attack(F.STRAY_FILE, BIN, outcome="note")
def bin_beside_safetensors(d: Path) -> None:
    """A pickle beside safetensors must not be opened."""
    good_single(d)
    _malicious(d / BIN, d / "executed")


@attack(F.AMBIGUOUS_FILES, SINGLE)
def single_beside_shards_without_index(d: Path) -> None:
    """A single file and shards, and nothing to tell which counts."""
    good_sharded(d)
    (d / INDEX).unlink()
    write_sparse_file(d / SINGLE, TENSORS)


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_parent_directory(d: Path) -> None:
    """The index leads out of the directory."""
    redirect(d, "../x")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_absolute_path(d: Path) -> None:
    """The index names a file of the system."""
    redirect(d, "/etc/passwd")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_hidden_parent(d: Path) -> None:
    """A path that leads out by way of a directory inside."""
    redirect(d, "shards/../../x.safetensors")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_backslash(d: Path) -> None:
    """The same for another operating system."""
    redirect(d, "..\\x.safetensors")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_nul(d: Path) -> None:
    """A NUL, at which C ends the name."""
    redirect(d, "model.safetensors\0.png")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_dot(d: Path) -> None:
    """The directory itself."""
    redirect(d, ".")


@attack(F.UNSAFE_FILE_NAME, INDEX, "model.norm.weight")
def index_escape_in_file(d: Path) -> None:
    """A file name that writes to the terminal."""
    redirect(d, "\x1b[2J.safetensors")


@attack(F.BAD_INDEX, INDEX, "model.norm.weight")
def index_value_is_number(d: Path) -> None:
    """A file that is no string."""
    redirect(d, 7)


@attack(F.BAD_NAME, INDEX, r"\x07")
def index_control_name(d: Path) -> None:
    """A tensor's name that rings the bell."""
    edit_index(d, lambda weight_map: weight_map.update({"\x07": SHARDS[0]}))


@attack(F.BAD_INDEX, INDEX)
def index_without_weight_map(d: Path) -> None:
    """An index that indexes nothing."""
    good_sharded(d)
    (d / INDEX).write_text("{}")


@attack(F.BAD_JSON, INDEX)
def index_nested(d: Path) -> None:
    """A hundred thousand levels of nesting."""
    good_sharded(d)
    (d / INDEX).write_text("[" * 100_000)


@attack(F.BAD_JSON, INDEX)
def index_of_empty_lists(d: Path) -> None:
    """60 MB of empty lists in the index's metadata."""
    good_sharded(d)
    (d / INDEX).write_text('{"metadata":[' + "[]," * 20_000_000)


@attack(F.BAD_JSON, INDEX)
def index_wide(d: Path) -> None:
    """31 MB of metadata with one emoji, for which Python would take four bytes for each character."""
    good_sharded(d)
    (d / INDEX).write_text('{"metadata":{"a":"' + "x" * 31_000_000 + '\N{SNAKE}"},"weight_map":{"a":"b"}}', encoding="utf-8")


@attack(F.DUPLICATE_KEY, INDEX, "a")
def index_duplicate_key(d: Path) -> None:
    """One tensor in two files, of which parsers see the last or the first."""
    good_sharded(d)
    (d / INDEX).write_text(f'{{"weight_map":{{"a":"{SHARDS[0]}","a":"{SHARDS[1]}"}}}}')


@attack(F.BAD_JSON, INDEX)
def index_million_entries(d: Path) -> None:
    """A million entries."""
    good_sharded(d)
    (d / INDEX).write_text(json.dumps({"weight_map": {f"t{i}": SHARDS[0] for i in range(1_000_000)}}))


@attack(F.TOO_MANY_PROBLEMS, SHARDS[0])
def index_hundred_thousand_absent(d: Path) -> None:
    """100,000 tensors that are in no file: the report must stay readable."""
    edit_index(d, lambda weight_map: weight_map.update({f"t{i}": SHARDS[0] for i in range(100_000)}))


@attack(F.TOO_MANY_PROBLEMS, INDEX)
def index_hundred_thousand_files(d: Path) -> None:
    """100,000 shards that are not there."""
    edit_index(d, lambda weight_map: weight_map.update({f"t{i}": f"s{i}.safetensors" for i in range(100_000)}))


# ---------------------------------------------------------------------------------------------- the file system


@attack(F.NO_WEIGHTS)
def empty_directory(d: Path) -> None:
    """Nothing there."""


@attack(F.NO_WEIGHTS)
def config_alone(d: Path) -> None:
    """A configuration without weights."""
    with_config(d)


@attack(F.NO_WEIGHTS)
def only_training_state(d: Path) -> None:
    """The state of an optimiser is no model."""
    with_config(d)
    _malicious(d / "optimizer.pt", d / "executed")
    _malicious(d / "training_args.bin", d / "executed")


@attack(F.NOT_A_DIRECTORY)
def file_as_directory(d: Path) -> Path:
    """The weights' file in place of their directory."""
    good_single(d)
    return d / SINGLE


@attack(F.NO_DIRECTORY)
def directory_absent(d: Path) -> Path:
    """A path that leads nowhere."""
    return d / "nothing" / "here"


@attack(F.DANGLING_LINK, SINGLE)
def dangling_link(d: Path) -> None:
    """A link into a cache that was cleaned."""
    with_config(d).symlink_to("../../blobs/0123456789abcdef")


@attack(F.DANGLING_LINK, SHARDS[1])
def dangling_shard(d: Path) -> None:
    """The same for one shard of an index."""
    good_sharded(d)
    (d / SHARDS[1]).unlink()
    (d / SHARDS[1]).symlink_to("../../blobs/0123456789abcdef")


@attack(F.DANGLING_LINK, SINGLE)
def link_loop(d: Path) -> None:
    """Two links that lead to each other."""
    with_config(d).symlink_to("other")
    (d / "other").symlink_to(SINGLE)


@attack(None, outcome="fine")
def link_without_suffix(d: Path) -> Path:
    """Not an attack: the Hugging Face cache, where names link to blobs that have no suffix."""
    snapshot, blobs = d / "snapshots" / "main", d / "blobs"
    good_sharded(snapshot)
    blobs.mkdir()
    for i, file in enumerate(sorted(snapshot.iterdir())):
        shutil.move(file, blobs / f"{i:064x}")
        file.symlink_to(Path("../../blobs") / f"{i:064x}")
    return snapshot


@attack(F.NOT_A_FILE, SINGLE)
def named_pipe(d: Path) -> None:
    """A pipe that nobody writes to: opening it would wait for ever."""
    os.mkfifo(with_config(d))


@attack(F.NOT_A_FILE, SHARDS[1])
def shard_is_pipe(d: Path) -> None:
    """The same for one shard of an index."""
    good_sharded(d)
    (d / SHARDS[1]).unlink()
    os.mkfifo(d / SHARDS[1])


@attack(F.NOT_A_FILE, SINGLE)
def directory_as_file(d: Path) -> None:
    """A directory with the name of the weights."""
    with_config(d).mkdir()


@attack(F.NOT_A_FILE, SHARDS[0])
def shard_is_dev_zero(d: Path) -> None:
    """A shard that never ends."""
    good_sharded(d)
    (d / SHARDS[0]).unlink()
    (d / SHARDS[0]).symlink_to("/dev/zero")


@attack(F.NOT_A_FILE, INDEX)
def index_is_pipe(d: Path) -> None:
    """An index that waits for a writer."""
    good_sharded(d)
    (d / INDEX).unlink()
    os.mkfifo(d / INDEX)


@attack(F.GIT_LFS_POINTER, SINGLE)
def lfs_pointer(d: Path) -> None:
    """A clone without ``git lfs pull``."""
    with_config(d).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")


# ---------------------------------------------------------------------------------------------- torch files


class _Executes:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.marker),))


def archive(
    path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED, order: bytes = b"little", storage: bytes = b"\0" * 16
) -> None:
    """An archive laid out as ``torch.save`` does it."""
    with zipfile.ZipFile(path, "w", compression) as z:
        z.writestr("archive/data.pkl", pickled)
        z.writestr("archive/byteorder", order)
        z.writestr("archive/data/0", storage)
        z.writestr("archive/version", b"3\n")


def _malicious(path: Path, marker: Path) -> None:
    archive(path, pickle.dumps({"w": _Executes(marker)}, protocol=2))


def torch_pickle(numel: int = 4, shape: tuple[int, ...] = (4,), stride: tuple[int, ...] = (1,), offset: int = 0, key: str = "0") -> bytes:
    """The pickle of ``{"w": float32 tensor}`` as torch writes it, with any claims about the storage."""

    def integer(n: int) -> bytes:
        return b"J" + struct.pack("<i", n) if n < 2**31 else b"\x8a\x09" + struct.pack("<Q", n) + b"\0"

    def text(s: str) -> bytes:
        return b"X" + struct.pack("<I", len(s)) + s.encode()

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(integer, values)) + b"t"

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + integer(numel) + b"tQ"
    tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(offset) + numbers(shape) + numbers(stride)
    tensor += b"\x89ccollections\nOrderedDict\n)RtR"
    return b"\x80\x02}" + text("w") + tensor + b"s."


@attack(F.UNSAFE_PICKLE, BIN)
def pickle_executes(d: Path) -> None:
    """A pickle that makes a directory when it is loaded."""
    with_config(d)
    _malicious(d / BIN, d / "executed")


@attack(F.UNSAFE_PICKLE, BIN)
def pickle_calls_torch(d: Path) -> None:
    """A pickle that calls a function of torch itself, which would load another file without any care."""
    with_config(d)
    archive(d / BIN, b"\x80\x02ctorch.hub\nload\n(X\x01\x00\x00\x00xtR.")


@attack(F.UNSAFE_PICKLE, BIN)
def pickle_evaluates(d: Path) -> None:
    """A built-in function, from the module that also has harmless ones."""
    with_config(d)
    code = f"__import__('os').mkdir({str(d / 'executed')!r})".encode()
    archive(d / BIN, b"\x80\x02c__builtin__\neval\n(X" + struct.pack("<I", len(code)) + code + b"tR.")


@attack(F.LEGACY_PICKLE, BIN)
def legacy_pickle(d: Path) -> None:
    """The same without an archive around it, as torch wrote before version 1.6."""
    with_config(d)
    (d / BIN).write_bytes(pickle.dumps({"w": _Executes(d / "executed")}, protocol=2))


@attack(F.NOT_AN_ARCHIVE, BIN)
def bin_of_text(d: Path) -> None:
    """An error page saved as weights."""
    with_config(d)
    (d / BIN).write_text("<html>404</html>")


@attack(F.TRUNCATED_FILE, BIN)
def bin_truncated(d: Path) -> None:
    """An archive that lost its directory."""
    with_config(d)
    archive(d / BIN, torch_pickle())
    os.truncate(d / BIN, (d / BIN).stat().st_size - 30)


@attack(F.COMPRESSED_ARCHIVE, BIN)
def bin_compressed(d: Path) -> None:
    """A compressed archive: a megabyte in the file, a gigabyte in memory."""
    with_config(d)
    archive(d / BIN, torch_pickle(), zipfile.ZIP_DEFLATED, storage=b"\0" * 20_000_000)


@attack(F.BAD_PICKLE, BIN)
def bin_huge_pickle(d: Path) -> None:
    """Thirty million empty lists in the pickle."""
    with_config(d)
    archive(d / BIN, b"\x80\x02" + b"]" * 30_000_000)


@attack(F.BAD_PICKLE, BIN)
def bin_many_lists(d: Path) -> None:
    """A pickle of legal size that builds as many objects as it can."""
    with_config(d)
    archive(d / BIN, b"\x80\x02" + b"]" * 1_999_000)


@attack(F.BAD_PICKLE, BIN)
def bin_not_a_state_dict(d: Path) -> None:
    """A list instead of a state dict."""
    with_config(d)
    archive(d / BIN, pickle.dumps([1, 2, 3], protocol=2))


@attack(F.BAD_PICKLE, BIN)
def bin_garbage_pickle(d: Path) -> None:
    """Operators without operands."""
    with_config(d)
    archive(d / BIN, b"\x80\x02tRbQ.")


@attack(F.BIG_ENDIAN, BIN)
def bin_big_endian(d: Path) -> None:
    """Numbers in the other byte order."""
    with_config(d)
    archive(d / BIN, torch_pickle(), order=b"big")


@attack(F.BAD_ARCHIVE, BIN, "w")
def bin_storage_too_short(d: Path) -> None:
    """A tensor that reaches beyond its storage, into what lies behind it in the file."""
    with_config(d)
    archive(d / BIN, torch_pickle(numel=1000, shape=(1000,)))


@attack(F.BAD_PICKLE, BIN)
def bin_storage_absent(d: Path) -> None:
    """A tensor of a storage that is not in the archive."""
    with_config(d)
    archive(d / BIN, torch_pickle(key="7"))


@attack(F.BAD_ARCHIVE, BIN, "w")
def bin_offset_beyond(d: Path) -> None:
    """A view that starts beyond its storage."""
    with_config(d)
    archive(d / BIN, torch_pickle(offset=1 << 40))


@attack(F.BAD_ARCHIVE, BIN)
def bin_two_records(d: Path) -> None:
    """The description twice: which one is read depends on the reader."""
    with_config(d)
    with zipfile.ZipFile(d / BIN, "w") as z:
        for prefix in ("a", "b"):
            z.writestr(f"{prefix}/data.pkl", torch_pickle())


@attack(F.BAD_ARCHIVE, BIN)
def bin_huge_directory(d: Path) -> None:
    """An archive that claims a directory of 4 GB."""
    with_config(d)
    archive(d / BIN, torch_pickle())
    raw = bytearray((d / BIN).read_bytes())
    raw[-10:-6] = b"\xfe\xff\xff\xff"
    (d / BIN).write_bytes(raw)


@attack(F.AMBIGUOUS_FILES, "a.pt")
def several_torch_files(d: Path) -> None:
    """Two checkpoints of a training run in one directory."""
    with_config(d)
    for name in ("a.pt", "b.pt"):
        archive(d / name, torch_pickle())


# ---------------------------------------------------------------------------------------------- config.json


def _config(d: Path, text: str | bytes) -> None:
    good_single(d)
    (d / "config.json").write_bytes(text.encode() if isinstance(text, str) else text)


@attack(F.NO_CONFIG, "config.json", outcome="config")
def config_absent(d: Path) -> None:
    """Weights without a configuration."""
    good_single(d)
    (d / "config.json").unlink()


@attack(F.NO_ARCHITECTURE, "config.json", outcome="config")
def config_without_architectures(d: Path) -> None:
    """A configuration that does not say what the weights are."""
    _config(d, json.dumps({k: v for k, v in CONFIG.items() if k != "architectures"}))


@attack(F.NO_ARCHITECTURE, "config.json", outcome="config")
def config_architectures_string(d: Path) -> None:
    """A string where a list is due."""
    _config(d, json.dumps(CONFIG | {"architectures": "LlamaForCausalLM"}))


@attack(F.NO_ARCHITECTURE, "config.json", outcome="config")
def config_architectures_empty(d: Path) -> None:
    """An empty list."""
    _config(d, json.dumps(CONFIG | {"architectures": []}))


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_not_json(d: Path) -> None:
    """A configuration cut short."""
    _config(d, '{"architectures": [')


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_nested(d: Path) -> None:
    """A hundred thousand levels of nesting."""
    _config(d, '{"a":' * 100_000)


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_is_list(d: Path) -> None:
    """JSON, and no object."""
    _config(d, "[1]")


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_nan(d: Path) -> None:
    """NaN for a size."""
    _config(d, json.dumps(CONFIG | {"rms_norm_eps": float("nan")}))


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_huge_number(d: Path) -> None:
    """A number of a million digits, which takes quadratic time to convert."""
    _config(d, '{"hidden_size": ' + "9" * 1_000_000 + "}")


@attack(F.BAD_JSON, "config.json", outcome="config")
def config_too_large(d: Path) -> None:
    """A gigabyte of nothing."""
    _config(d, "")
    os.truncate(d / "config.json", 1_000_000_000)


@attack(F.NOT_A_FILE, "config.json", outcome="config")
def config_is_pipe(d: Path) -> None:
    """A configuration that waits for a writer."""
    good_single(d)
    (d / "config.json").unlink()
    os.mkfifo(d / "config.json")


@attack(F.DANGLING_LINK, "config.json", outcome="config")
def config_dangling(d: Path) -> None:
    """A link into a cache that was cleaned."""
    good_single(d)
    (d / "config.json").unlink()
    (d / "config.json").symlink_to("../../blobs/00")
