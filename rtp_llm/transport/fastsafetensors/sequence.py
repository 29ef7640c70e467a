"""The sequence in which a plan's bytes are read, and its portions: pure arithmetic.

Three sizes nest.  A *piece* is a block of rows of one tensor: one expert of a stacked tensor, at most a message's rows of any
other, or all of an indivisible tensor.  A *message* is neighbouring pieces that are broadcast together, so that thousands of small
tensors are few collectives.  A *chunk* is neighbouring messages that are read, and held on the device, together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rtp_llm.checkpoint.catalog import TensorInfo
from rtp_llm.config.load import StackedMode
from rtp_llm.errors import TransportError, internal
from rtp_llm.plan.boxes import Box, whole
from rtp_llm.plan.ops import Select, Source
from rtp_llm.plan.plan import Delivery, LoadPlan
from rtp_llm.transport.faults import TransportFault

#: Most bytes of a message of small tensors, or of rows of a large one.  Enough for the link's speed (measured: 4 MiB reach half
#: of it, 64 MiB all), and a small buffer for receivers.
MESSAGE_BYTES = 16 << 20
#: A message is at most this part of a chunk, so that it is small beside its sender's chunks.
_CHUNK_MESSAGES = 16
#: Gaps of up to this many bytes between two messages are read over: that takes less time than another chunk.
GAP_BYTES = 1 << 20
#: Chunks begin at multiples of this in the file, so that alignment in the file is kept on the device.
ALIGNMENT = 16


class Split(Enum):
    """How a tensor may be divided."""

    EXPERTS = "row by row: each is one expert"
    ROWS = "at any row"
    NEVER = "not at all"


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The ``box`` of ``tensor``, whole rows of it, whose bytes are ``[start, stop)`` of the tensor's file."""

    tensor: TensorInfo
    box: Box
    start: int
    stop: int
    split: Split


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces whose bytes follow one another in one file."""

    pieces: tuple[FilePiece, ...]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        return self.pieces[-1].stop

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Chunk:
    """Messages of one file, in its order, read as the bytes ``[start, stop)``."""

    file: str
    start: int
    stop: int
    messages: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def splits(slots: Mapping[str, Source], mode: StackedMode) -> dict[str, Split]:
    """For each raw tensor how it may be divided, by all of its slots on any rank."""
    by_raw: defaultdict[str, list[Source]] = defaultdict(list)
    for source in slots.values():
        by_raw[source.raw].append(source)
    return {raw: _split(sources, mode) for raw, sources in by_raw.items()}


def _split(sources: Sequence[Source], mode: StackedMode) -> Split:
    if all(source.ops and isinstance(source.ops[0], Select) for source in sources):
        return Split.EXPERTS if mode is StackedMode.PER_EXPERT else Split.NEVER
    return Split.ROWS if all(op.local for source in sources for op in source.ops) else Split.NEVER


def local_pieces(plan: LoadPlan, kinds: Mapping[str, Split], most_bytes: int) -> Iterator[FilePiece]:
    """One rank's pieces, in file order: only rows that one of its deliveries touches."""
    wanted: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    tensors: dict[str, TensorInfo] = {}
    for delivery in plan.deliveries:
        if delivery.nbytes:
            tensors[delivery.tensor.name] = delivery.tensor
            wanted[delivery.tensor.name].append(next(iter(delivery.raw_box), (0, 1)))
    for tensor in in_file_order(tensors.values()):
        yield from _pieces(tensor, kinds[tensor.name], _merged(wanted[tensor.name]), most_bytes)


def common_pieces(plan: LoadPlan, kinds: Mapping[str, Split], most_bytes: int) -> Iterator[FilePiece]:
    """The pieces of all ranks together: every tensor that provides a slot; the same on every rank."""
    for tensor in in_file_order(t for t in plan.catalog.tensors if t.name in kinds and t.nbytes):
        yield from _pieces(tensor, kinds[tensor.name], [next(iter(whole(tensor.shape)), (0, 1))], most_bytes)


def in_file_order(tensors: Iterable[TensorInfo]) -> list[TensorInfo]:
    return sorted(tensors, key=lambda t: (t.file, t.start))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for a, b in sorted(ranges):
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def _pieces(tensor: TensorInfo, kind: Split, rows: list[tuple[int, int]], most_bytes: int) -> Iterator[FilePiece]:
    # One dimension: a row is one element, and elements narrower than a byte cannot be cut apart.
    if kind is Split.NEVER or len(tensor.shape) < 2 or tensor.nbytes % tensor.shape[0]:
        yield FilePiece(tensor, whole(tensor.shape), tensor.start, tensor.stop, Split.NEVER)
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    step = 1 if kind is Split.EXPERTS else max(1, most_bytes // row_bytes)
    for first, last in rows:
        for a in range(first, last, step):
            b = min(a + step, last)
            yield FilePiece(tensor, ((a, b), *whole(tensor.shape[1:])), tensor.start + a * row_bytes, tensor.start + b * row_bytes, kind)


def messages(pieces: Iterable[FilePiece], most_bytes: int, experts_alone: bool) -> Iterator[Message]:
    """Joins neighbouring pieces, up to ``most_bytes``; ``experts_alone``: each expert is a message of its own."""
    held: list[FilePiece] = []
    for piece in pieces:
        alone = experts_alone and Split.EXPERTS in (piece.split, *(p.split for p in held[-1:]))
        if held and (alone or not _follows(held, piece) or piece.stop - held[0].start > most_bytes):
            yield Message(tuple(held))
            held = []
        held.append(piece)
    if held:
        yield Message(tuple(held))


def _follows(held: list[FilePiece], piece: FilePiece) -> bool:
    return (piece.tensor.file, piece.start) == (held[-1].tensor.file, held[-1].stop)


def chunks(parts: Iterable[Message], most_bytes: int) -> Iterator[Chunk]:
    """Joins messages that are close to one another in one file, up to a span of ``most_bytes``."""
    held: list[Message] = []
    for part in parts:
        if held:
            same = part.pieces[0].tensor.file == held[0].pieces[0].tensor.file
            if not same or part.start - held[-1].stop > GAP_BYTES or part.stop - _aligned(held[0].start) > most_bytes:
                yield _chunk(held)
                held = []
        held.append(part)
    if held:
        yield _chunk(held)


def _aligned(offset: int) -> int:
    return offset // ALIGNMENT * ALIGNMENT


def _chunk(held: list[Message]) -> Chunk:
    return Chunk(held[0].pieces[0].tensor.file, _aligned(held[0].start), held[-1].stop, tuple(held))


def rounds(files: Sequence[str], all_chunks: Iterable[Chunk], world: int) -> Iterator[tuple[int, Chunk]]:
    """The one order in which a group reads and delivers: each chunk with the rank that reads it.

    Rank i mod ``world`` reads file i; the ranks' files go side by side, a chunk of each in turn.
    """
    by_file: defaultdict[str, list[Chunk]] = defaultdict(list)
    for chunk in all_chunks:
        by_file[chunk.file].append(chunk)
    for first in range(0, len(files), world):
        abreast = [by_file[file] for file in files[first : first + world]]
        for turn in range(max(map(len, abreast), default=0)):
            for rank, own in enumerate(abreast):
                if turn < len(own):
                    yield rank, own[turn]


def sequence_lines(order: Iterable[tuple[int, Chunk]], terms: str) -> Iterator[str]:
    """What ranks must have in common before their first collective, a line each: ``terms`` (mode, tier), then the sequence:
    which rank reads which bytes of which tensors."""
    yield terms
    for rank, chunk in order:
        yield f"chunk of {chunk.file} at {chunk.start} to {chunk.stop} from rank {rank}"
        for number, message in enumerate(chunk.messages):
            for piece in message.pieces:
                t = piece.tensor
                yield f"message {number}: {t.name} {t.dtype} {list(t.shape)} rows {list(piece.box[:1])} at {piece.start}"


def resident_chunks(sizes: Sequence[int], depth: int) -> int:
    """The most bytes that ``depth`` chunks in a row take."""
    return max((sum(sizes[i : i + depth]) for i in range(len(sizes))), default=0)


def narrowed(delivery: Delivery, box: Box) -> Delivery | None:
    """The part of ``delivery`` in the rows of ``box``, a piece of its tensor; None where there is none."""
    raw = delivery.raw_box
    if not raw:
        return delivery
    first, last = max(raw[0][0], box[0][0]), min(raw[0][1], box[0][1])
    if first >= last:
        return None
    if (first, last) == raw[0]:
        return delivery
    if not delivery.divisible:
        raise TransportError(internal(TransportFault.INTERNAL, "it is cut where an op does not allow it", tensor=delivery.tensor.name))
    return delivery.part(((first, last), *raw[1:]))


def _message_bytes(chunk_bytes: int) -> int:
    return max(1, min(chunk_bytes // _CHUNK_MESSAGES, MESSAGE_BYTES))


def local_chunks(plan: LoadPlan, mode: StackedMode, most_bytes: int) -> tuple[Chunk, ...]:
    """One rank's chunks, in order."""
    small = _message_bytes(most_bytes)
    pieces = local_pieces(plan, splits(plan.slots, mode), small)
    return tuple(chunks(messages(pieces, small, experts_alone=False), most_bytes))


def group_order(plan: LoadPlan, mode: StackedMode, most_bytes: int, world: int) -> tuple[tuple[int, Chunk], ...]:
    """The chunks of a group of ``world`` ranks, each with the rank that reads it, in order; the same on all ranks."""
    small = _message_bytes(most_bytes)
    pieces = common_pieces(plan, splits(plan.slots, mode), small)
    parts = chunks(messages(pieces, small, experts_alone=True), most_bytes)
    return tuple(rounds([f.name for f in plan.catalog.files], parts, world))
