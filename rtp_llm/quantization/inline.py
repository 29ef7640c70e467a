"""Quantises plain weights to FP8 while they are loaded.

Scales come from whole tensors, rows or blocks of the checkpoint, never from a rank's shard, so the codes do not depend on the
number of ranks.  A rank reads the tensor, rows or blocks that its scales depend on, each byte once, and writes only its own
codes, directly to their parameter.

With scales for rows or blocks a tensor is quantised in bands of rows, as they arrive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.errors import PlanError, internal
from rtp_llm.parallel.shard import Span
from rtp_llm.plan.boxes import Box, Shape, extent, view, volume
from rtp_llm.plan.derived import DerivedTile, OutputPlace
from rtp_llm.plan.faults import PlanFault
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Laid, Matrix, TensorForm
from rtp_llm.quantization.scaled import Grid, Scaled, grid_label

#: DeepSeek-V3's, for which kernels exist.
_BLOCK = (128, 128)

#: The methods, as the setting names them.
GRIDS: Mapping[str, Grid] = {"inline-fp8-tensor": "tensor", "inline-fp8-channel": "channel", "inline-fp8-block": _BLOCK}

#: The largest E4M3 number.
_MAX = 448.0

#: Elements of a band: enough that launching some 16 operations, of some 10 microseconds each, does not show, and a fraction of a
#: large matrix.
_BAND = 2**24
#: Bytes of working memory for each scale: extremes of both signs and the larger one, in a stored dtype of up to eight bytes, the scale
#: and a comparison.
_BYTES_A_SCALE = 29

#: Last parts of slots that stay plain, as in published FP8 checkpoints: gates, whose few rows matter much and cost little,
#: low-rank gates of linear attention, an encoder's pooler.  (Routers, heads and embeddings are no linear layers here.)
_KEPT = frozenset({"shared_gate", "b", "f_a", "f_b", "g_a", "g_b", "weights", "pooler"})


def stays_plain(slot: str) -> bool:
    """Whether the linear layer ``slot`` is not quantised."""
    return slot.rpartition(".")[2] in _KEPT


def inline_scheme(method: str) -> Scaled:
    """The scheme of the quantised weights: E4M3 codes and float32 scales."""
    grid = GRIDS[method]
    weight = TensorForm("weight", "float8_e4m3fn", (Along(ROWS), Along(COLUMNS)))
    scale = TensorForm("weight_scale", "float32", scale_dims(grid))
    return Scaled(f"FP8, {grid_label(grid)}, made while loading", grid, weight, scale)


def scale_dims(grid: Grid) -> tuple[Along | Fixed, ...]:
    """The dimensions of the scale."""
    if grid == "tensor":
        return (Fixed(1),)
    if grid == "channel":
        return Along(ROWS), Fixed(1)
    assert not isinstance(grid, str)
    return Along(ROWS, grid[0], partial=True), Along(COLUMNS, grid[1], partial=True)


@dataclass(frozen=True, slots=True)
class Quantiser:
    """Makes ``weight`` (E4M3 codes) and ``weight_scale`` (float32).

    ``scale = amax / 448``, 1 where that is 0; ``code = cast(clamp(w / scale, -448, 448))``, in float32 from the stored value.
    """

    grid: Grid

    def needs(self, output: str, box: Box, shape: Shape) -> Box:
        rows, columns = shape
        if self.grid == "tensor":
            return (0, rows), (0, columns)
        if self.grid == "channel":
            return box[0], (0, columns)
        assert not isinstance(self.grid, str)
        per = self.grid if output == "weight" else (1, 1)
        return tuple((g * (a // p), min(n, g * -(-b // p))) for (a, b), n, g, p in zip(box, shape, self.grid, per, strict=True))

    def working_bytes(self, region: Box, step_bytes: int) -> int:
        rows, columns = extent(region)
        bn, bk = self._block((rows, columns))
        step = min(4 * rows * columns, max(step_bytes, 4 * columns))
        return step + _BYTES_A_SCALE * -(-rows // max(1, bn)) * -(-columns // max(1, bk))

    def derive(self, content: torch.Tensor, region: Box, places: Sequence[OutputPlace], step_bytes: int) -> None:
        scale = self._scale(content)
        rows, columns = (first for first, _ in region)
        for output, box, memory in places:
            if output == "weight":
                (a, b), (c, d) = box
                self._encode(content, scale, (a - rows, b - rows), (c - columns, d - columns), memory, max(1, step_bytes // 4))
            else:
                memory.copy_(view(self._stored(scale), self._within(box, region)))

    def _block(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of ``shape`` that share a scale."""
        if self.grid == "tensor":
            return shape[0], shape[1]
        if self.grid == "channel":
            return 1, shape[1]
        assert not isinstance(self.grid, str)
        return self.grid

    def _stored(self, scale: torch.Tensor) -> torch.Tensor:
        """Scales ``[block rows, block columns]`` in their tensor's shape."""
        return scale.reshape(1) if self.grid == "tensor" else scale

    def _within(self, box: Box, region: Box) -> Box:
        """A box of the tensor of scales, counted from the first scale of ``region``."""
        if self.grid == "tensor":
            return box
        per = (1, 1) if isinstance(self.grid, str) else self.grid
        return tuple((a - first // p, b - first // p) for (a, b), (first, _), p in zip(box, region, per, strict=True))

    def _scale(self, content: torch.Tensor) -> torch.Tensor:
        """The scales of a content that begins at a block: float32 ``[block rows, block columns]``."""
        rows, columns = content.shape
        bn, bk = self._block((rows, columns))
        amax = torch.empty(-(-rows // bn), -(-columns // bk), dtype=torch.float32, device=content.device)
        for a, b, n in _evenly((0, rows), bn):
            for c, d, k in _evenly((0, columns), bk):
                blocks = content[a:b, c:d].view(-1, n, (d - c) // k, k)
                # Minimum and maximum: absolute values would take a copy of the tensor.
                if blocks.shape[0] * blocks.shape[2] == 1:
                    least, most = torch.aminmax(blocks)
                elif n > 1:  # one dimension after the other is faster on the CPU
                    least, most = blocks.amin(1).amin(2), blocks.amax(1).amax(2)
                else:
                    least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
                amax[a // bn : -(-b // bn), c // bk : -(-d // bk)] = torch.maximum(least.neg_(), most)
        # Divided by a tensor: for a number torch's CUDA kernel multiplies by the reciprocal, and rounds differently from the CPU.
        scale = amax.div_(torch.full((), _MAX, device=content.device))
        # Also for an underflow: 0 / 0 is no code.
        return scale.masked_fill_(scale == 0, 1.0)

    def _encode(self, content: torch.Tensor, scale: torch.Tensor, rows: Span, columns: Span, memory: torch.Tensor, step: int) -> None:
        """Writes the codes of some rows and columns of ``content`` to ``memory``, ``step`` elements at a time."""
        bn, bk = self._block(tuple(content.shape))
        for c, d, k in _evenly(columns, bk):
            part = memory[:, c - columns[0] : d - columns[0]]
            for a, b, n in _stepped(rows, bn, max(1, step // (d - c))):
                scales = scale[a // bn : -(-b // bn), c // bk : -(-d // bk)]
                part[a - rows[0] : b - rows[0]].copy_(_divided(content[a:b, c:d], scales, n, k))


def _divided(part: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A part made of blocks of ``rows`` and ``columns``, divided by its scales: float32, clamped to the range of E4M3."""
    wide = part.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    wide.view(-1, rows, scales.shape[1], columns).div_(scales[:, None, :, None])
    return wide.clamp_(-_MAX, _MAX)


def _evenly(span: Span, per: int) -> Iterator[tuple[int, int, int]]:
    """Cuts a span at the borders of blocks of ``per``: start, stop, and the size of a block, for each part."""
    start, stop = span
    first, last = min(stop, -(-start // per) * per), stop // per * per
    for a, b, size in ((start, first, first - start), (first, last, per), (max(first, last), stop, stop - max(first, last))):
        if b > a:
            yield a, b, size


def _stepped(span: Span, per: int, most: int) -> Iterator[tuple[int, int, int]]:
    """The same, in steps of at most ``most``."""
    for start, stop, size in _evenly(span, per):
        if size > most:
            for block in range(start, stop, size):
                for a in range(block, block + size, most):
                    b = min(a + most, block + size)
                    yield a, b, b - a
        else:
            step = most // size * size
            for a in range(start, stop, step):
                yield a, min(a + step, stop), size


def made_tiles(laid: Laid, matrices: Sequence[Matrix], grid: Grid) -> tuple[DerivedTile, ...]:
    """The tiles of one parameter, codes or scales, which are derived from the matrices' plain weights.

    Both parameters are cut at the same rows, so one read gives codes and scales of a band.
    """
    transform = Quantiser(grid)
    tiles = []
    for matrix, local in zip(matrices, laid.boxes, strict=True):
        box = tuple(dim.span(matrix) for dim in laid.form.dims)
        lead = len(local) - len(box)
        if extent(box) != extent(local)[lead:]:
            raise PlanError(internal(PlanFault.INTERNAL, f"{laid.form.name} of it has another shape than its place", tensor=matrix.slot))
        for part in _bands(box, laid.form, matrix, grid):
            moved = ((p - a + o, q - a + o) for (p, q), (a, _), (o, _) in zip(part, box, local[lead:], strict=True))
            tiles.append(DerivedTile(f"{matrix.slot}.weight", matrix.shape, transform, laid.form.name, part, (*local[:lead], *moved)))
    return tuple(tiles)


def _bands(box: Box, form: TensorForm, matrix: Matrix, grid: Grid) -> Iterator[Box]:
    """``box`` of one of the matrix's tensors, cut into bands at rows that are the same for all these tensors."""
    rows = form.dims[ROWS]
    if grid == "tensor" or not isinstance(rows, Along) or not volume(box):
        yield box
        return
    per = 1 if isinstance(grid, str) else grid[0]
    band = max(1, _BAND // matrix.shape[COLUMNS] // per) * per // rows.per
    start, stop = box[ROWS]
    for a in range(start // band * band, stop, band):
        yield (max(start, a), min(stop, a + band)), *box[ROWS + 1 :]
