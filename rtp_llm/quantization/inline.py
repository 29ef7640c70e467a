"""FP8 made of plain weights while they are loaded.

Scales come from whole tensors, rows or blocks as the checkpoint has them, never from a rank's shard: so the codes are the same
at every number of ranks.  A rank reads what its shard's scales depend on (for one scale the whole tensor, for rows whole rows,
for blocks whole blocks), each byte once, and keeps its shard of the codes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from rtp_llm.plan.boxes import Box, Shape, extent
from rtp_llm.plan.making import Made
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Fixed, Laid, Matrix, TensorForm
from rtp_llm.quantization.scaled import Grid, Scaled, grid_label

#: DeepSeek-V3's, for which kernels exist.
_BLOCK = (128, 128)

#: The methods, as the setting names them.
GRIDS: Mapping[str, Grid] = {"inline-fp8-tensor": "tensor", "inline-fp8-channel": "channel", "inline-fp8-block": _BLOCK}

#: The largest E4M3 number.
_MAX = 448.0

#: Elements that are quantised at once: a float32 copy of so many takes 4 MiB, whatever the tensor's size.
_CHUNK = 2**20
#: Bytes for each of them: the value, its scale and their quotient in float32, and the code.
_BYTES_A_CHUNK = 13

#: The last part of slots that stay as they are, as in published FP8 checkpoints: gates whose few rows decide much and cost
#: nothing, low-rank gates of linear attention, an encoder's pooler.  (Routers, heads and embeddings are no linear layers here.)
_KEPT = frozenset({"shared_gate", "b", "f_a", "f_b", "g_a", "g_b", "weights", "pooler"})


def kept_plain(slot: str) -> bool:
    """Whether a linear layer's ``slot`` names one that is not quantised."""
    return slot.rpartition(".")[2] in _KEPT


def inline_scheme(method: str) -> Scaled:
    """How the weights are held: E4M3 codes and float32 scales."""
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

    ``scale = amax / 448``, 1 for what is all zeros; ``code = cast(clamp(w / scale, -448, 448))``, in float32 from the stored value.
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

    def working_bytes(self, region: Box) -> int:
        rows, columns = extent(region)
        step = rows if not rows * columns else min(rows, self._step(columns))
        # Codes, scales (at most one a row or a block), and what one step takes; extremes of rows are of the scales' size.
        return rows * columns + 12 * rows + _BYTES_A_CHUNK * step * columns

    def _step(self, columns: int) -> int:
        """Rows that are quantised at once: whole blocks."""
        step = max(1, _CHUNK // max(1, columns))
        return step if isinstance(self.grid, str) else max(1, step // self.grid[0]) * self.grid[0]

    def make(self, content: torch.Tensor, region: Box) -> Mapping[str, tuple[torch.Tensor, Box]]:
        scale = self._scale(content)
        codes = torch.empty(content.shape, dtype=torch.float8_e4m3fn, device=content.device)
        step = self._step(content.shape[1])
        for start in range(0, content.shape[0], step):
            part = content[start : start + step]
            codes[start : start + step] = (part.float() / self._spread(scale, start, part.shape)).clamp_(-_MAX, _MAX).to(codes.dtype)
        return {"weight": (codes, region), "weight_scale": (scale, self._scale_box(scale, region))}

    def _scale(self, content: torch.Tensor) -> torch.Tensor:
        # Extremes, not the largest of absolute values: those would be a copy of the tensor.
        if self.grid == "tensor":
            least, most = torch.aminmax(content)
            amax = torch.maximum(-least, most).float().reshape(1)
        elif self.grid == "channel":
            # Two passes: along a dimension, aminmax takes four times as long.
            amax = torch.maximum(-content.amin(1, keepdim=True), content.amax(1, keepdim=True)).float()
        else:
            assert not isinstance(self.grid, str)
            bn, bk = self.grid
            rows, columns = content.shape
            amax = torch.empty(-(-rows // bn), -(-columns // bk), device=content.device)
            for i in range(amax.shape[0]):
                row = content[i * bn : (i + 1) * bn].abs().amax(dim=0)
                padded = torch.nn.functional.pad(row, (0, -columns % bk))
                amax[i] = padded.view(-1, bk).amax(dim=1).float()
        return torch.where(amax == 0, torch.ones_like(amax), amax / _MAX)

    def _spread(self, scale: torch.Tensor, start: int, shape: Iterable[int]) -> torch.Tensor:
        rows, columns = shape
        if self.grid == "tensor":
            return scale
        if self.grid == "channel":
            return scale[start : start + rows]
        assert not isinstance(self.grid, str)
        bn, bk = self.grid
        blocks = scale[start // bn : -(-(start + rows) // bn)]
        return blocks.repeat_interleave(bn, 0)[:rows].repeat_interleave(bk, 1)[:, :columns]

    def _scale_box(self, scale: torch.Tensor, region: Box) -> Box:
        if self.grid == "tensor":
            return ((0, 1),)
        if self.grid == "channel":
            return region[0], (0, 1)
        assert not isinstance(self.grid, str)
        first = (region[i][0] // self.grid[i] for i in (0, 1))
        return tuple((a, a + n) for a, n in zip(first, scale.shape, strict=True))


def made_tiles(laid: Laid, matrices: Sequence[Matrix], grid: Grid) -> tuple[Made, ...]:
    """The tiles of one of the two parameters: made of the plain weights of the matrices."""
    maker = Quantiser(grid)
    tiles = []
    for matrix, local in zip(matrices, laid.boxes, strict=True):
        box = tuple(dim.span(matrix) for dim in laid.form.dims)
        assert extent(box) == extent(local)[len(local) - len(box) :]
        tiles.append(Made(f"{matrix.slot}.weight", matrix.shape, maker, laid.form.name, box, local))
    return tuple(tiles)
