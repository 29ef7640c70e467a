"""Layers of experts (mixture of experts), divided between expert-parallel ranks and split over tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from rtp_llm.kernels.interface import KernelUser
from rtp_llm.kernels.needs import GateNeed
from rtp_llm.layers.activation import ClampedGate, Gate
from rtp_llm.layers.linear import ReplicatedLinear
from rtp_llm.layers.mlp import GatedMLP, MLPShape
from rtp_llm.layers.quantised import Quantisable
from rtp_llm.layers.router import Router, Routing
from rtp_llm.parallel.experts import replicas
from rtp_llm.parallel.groups import Groups
from rtp_llm.parallel.shard import Span, even
from rtp_llm.plan.boxes import Shape
from rtp_llm.plan.derived import DerivedTile
from rtp_llm.plan.pieces import ExpertSlots, Fill, Piece
from rtp_llm.quantization.forms import COLUMNS, ROWS, Along, Matrix, TensorForm, lay

#: torch's product of one matrix for each run of rows; not in all builds that we run on.
_grouped_mm = getattr(F, "grouped_mm", None)
#: How a plain weight lies in its parameter (the dtype is the parameter's own).
_PLAIN = TensorForm("weight", "", (Along(ROWS), Along(COLUMNS)))
#: The same of a bias.
_BIAS = TensorForm("bias", "", (Along(ROWS),))
#: What that takes, and the alignment in bytes that it asks of rows.
_GROUPED_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
_GROUPED_ALIGNMENT = 16
#: The first GPUs on which nothing of it happens on the host (torch/nn/functional.py, grouped_mm).
_GROUPED_CAPABILITY = (9, 0)


@dataclass(frozen=True, slots=True)
class MoEShape:
    """Sizes of a layer of experts, over all ranks.

    ``intermediate_size`` is that of one expert; ``shared_size`` that of all shared experts together (they are one MLP),
    None where there are none; ``shared_gate``: a sigmoid gate scales what they give.
    ``alternating``: rows of gate and up take turns in one matrix, of which this is the activation (``act`` is not used then).
    ``bias``: experts have biases.
    """

    hidden_size: int
    intermediate_size: int
    act: str
    routing: Routing
    shared_size: int | None = None
    shared_gate: bool = False
    alternating: ClampedGate | None = None
    bias: bool = False


class MoE(nn.Module):
    """``x [batch, seq, hidden] -> [batch, seq, hidden]``: the chosen experts' weighted sum, plus the shared experts.

    Slots: ``layers.{l}.router.weight`` (and ``.bias``), ``layers.{l}.experts.{e}.{gate,up,down}.weight`` (and ``.bias``; ``gate_up``
    for both where they alternate), ``layers.{l}.shared.{gate,up,down}.weight``, ``layers.{l}.shared_gate.weight``.
    """

    def __init__(self, layer: int, shape: MoEShape, *, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__()
        at, hidden = f"layers.{layer}", shape.hidden_size
        self.groups = groups
        self.router = Router(f"{at}.router", hidden, shape.routing, dtype=dtype)
        self.experts = Experts(layer, shape, groups=groups, dtype=dtype)
        self.shared: GatedMLP | None = None
        self.shared_gate: ReplicatedLinear | None = None
        if shape.shared_size is not None:
            self.shared = GatedMLP(f"{at}.shared", MLPShape(hidden, shape.shared_size, shape.act), tp=groups.tp, dtype=dtype)
            if shape.shared_gate:
                self.shared_gate = ReplicatedLinear(f"{at}.shared_gate", hidden, 1, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        out: torch.Tensor = self.groups.everyone.all_reduce(self.experts(tokens, weights, chosen)).view_as(x)
        if self.shared is None:
            return out
        shared: torch.Tensor = self.shared(x)
        return out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)


class Experts(Quantisable, KernelUser):
    """This rank's shards of its experts, and their contribution to the sum over all ranks.

    Parameters: ``gate_up [local experts, 2 * intermediate / tp, hidden]`` (gate above up, or their rows in turn) and ``down
    [local experts, hidden, intermediate / tp]``; with a quantisation scheme its tensors replace them.  With biases
    ``gate_up_bias [local experts, 2 * intermediate / tp]`` and ``down_bias [local experts, hidden]``: the latter whole on every
    rank; the first rank of a tensor-parallel group adds it.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter | None
    down_bias: nn.Parameter | None

    def __init__(self, layer: int, shape: MoEShape, *, groups: Groups, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.count = shape.routing.experts
        self.hidden_size = shape.hidden_size
        self.intermediate_size = shape.intermediate_size
        self.act: Gate | ClampedGate = shape.alternating or Gate(shape.act)
        self.bias = shape.bias
        self.first = groups.tp.rank == 0
        self.dtype = dtype
        outward = {"gate_up": 2} if shape.alternating else {"gate": 1, "up": 1}
        #: The full shape of each matrix of an expert.
        self.shapes: dict[str, tuple[int, int]] = {part: (n * shape.intermediate_size, shape.hidden_size) for part, n in outward.items()}
        self.shapes["down"] = (shape.hidden_size, shape.intermediate_size)
        self.span = even(shape.intermediate_size, groups.tp.size, groups.tp.rank)
        self.owners = groups.ep.held(layer, self.count)
        self.rank = groups.ep.rank
        local, width = len(self.owners[self.rank]), self.span[1] - self.span[0]
        self.declare("gate_up", (local, 2 * width, shape.hidden_size), dtype)
        self.declare("down", (local, shape.hidden_size, width), dtype)
        if shape.bias:
            self.declare("gate_up_bias", (local, 2 * width), dtype)
            self.declare("down_bias", (local, shape.hidden_size), dtype)
        else:
            self.gate_up_bias = self.down_bias = None
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None

    def kernel_needs(self) -> Iterator[GateNeed]:
        return self.act.needs(self.dtype, self.span[1] - self.span[0])

    def weights(self) -> dict[str, tuple[Matrix, ...]]:
        found: dict[str, list[Matrix]] = {"gate_up": [], "down": []}
        for place, expert in enumerate(self.owners[self.rank]):
            for part, full in self.shapes.items():
                slot = f"layers.{self.layer}.experts.{expert}.{part}"
                found[_attribute(part)].append(Matrix(slot, full, *self._spans(part), place))
        return {attribute: tuple(matrices) for attribute, matrices in found.items()}

    def _spans(self, part: str) -> tuple[Span, Span]:
        """The rows and columns of a part that this rank holds."""
        if part == "down":
            return (0, self.hidden_size), self.span
        # Alternating rows of gate and up are split in pairs.
        each = self.shapes[part][0] // self.intermediate_size
        return (each * self.span[0], each * self.span[1]), (0, self.hidden_size)

    def tiles(self) -> dict[str, tuple[Piece | Fill | DerivedTile, ...]]:
        weights = self.weights()
        plain = {name: lay(_PLAIN, matrices).tiles for name, matrices in weights.items() if name not in self.held}
        biases = {f"{name}_bias": lay(_BIAS, matrices).tiles for name, matrices in weights.items() if self.bias}
        return plain | biases | self.held_tiles()

    def experts(self) -> ExpertSlots:
        parts = tuple(
            (f"{part}.{name}", shape, dtype)
            for part, full in self.shapes.items()
            for name, shape, dtype in self._tensors_of(_attribute(part), Matrix("", full, (0, full[0]), (0, full[1])))
        )
        at = f"layers.{self.layer}"
        return ExpertSlots(self.layer, f"{at}.experts", f"{at}.router", self.count, parts, self.owners)

    def _tensors_of(self, attribute: str, matrix: Matrix) -> Iterator[tuple[str, Shape, str]]:
        """Name, full shape and dtype of each tensor that one whole matrix is stored as, its bias included."""
        if self.bias:
            yield "bias", matrix.shape[:1], str(self.dtype).removeprefix("torch.")
        held = self.held.get(attribute)
        if held is None or held.made:
            dtype = "float32" if held is not None else str(getattr(self, attribute).dtype).removeprefix("torch.")
            yield "weight", matrix.shape, dtype
            return
        for form in held.scheme.forms:
            yield form.name, form.shape(matrix), form.dtype

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """``x [tokens, hidden]``, ``weights`` and ``chosen [tokens, top_k]`` to this rank's part of the sum, ``[tokens, hidden]``.

        Pairs of token and expert are sorted by the expert's place, so each expert has one run of rows.  Pairs of other ranks
        come last and belong to no run.  Nothing waits for the device.
        """
        local = len(self.owners[self.rank])
        places = self._places(chosen)
        by_place, order = places.flatten().sort(stable=True)
        ends = torch.searchsorted(by_place, torch.arange(local, device=x.device), right=True, out_int32=True)
        rows = self._products(x[order // chosen.shape[-1]], "gate_up", ends)
        if self.gate_up_bias is not None:
            rows = rows + self.gate_up_bias[by_place.clamp(max=local - 1)]
        rows = self._products(self.act(self.kernels, rows), "down", ends)
        if self.down_bias is not None and self.first:
            rows = rows + self.down_bias[by_place.clamp(max=local - 1)]
        by_token = torch.empty_like(rows)
        by_token[order] = rows
        # Rows of no run may be NaN, which a weight of zero would keep.
        kept = by_token.view(*chosen.shape, -1).masked_fill((places == local)[..., None], 0)
        return (kept * weights[..., None]).sum(dim=1).to(x.dtype)

    def _products(self, x: torch.Tensor, attribute: str, ends: torch.Tensor) -> torch.Tensor:
        """Each run of rows times its expert's matrix, which is dequantised temporarily if it is quantised."""
        if attribute not in self.held:
            return grouped_linear(x, getattr(self, attribute), ends)
        places = range(len(self.owners[self.rank]))
        rows = 2 * (self.span[1] - self.span[0]) if attribute == "gate_up" else self.hidden_size
        return runs_linear(x, (partial(self._dense, attribute, place, x.dtype) for place in places), rows, ends)

    def _dense(self, attribute: str, place: int, dtype: torch.dtype) -> torch.Tensor:
        return self.dense(attribute, place).to(dtype)

    def host_bound(self) -> str:
        """Why this layer waits for the device, which a CUDA graph cannot record; empty if it does not."""
        weights = (self.gate_up, self.down) if not self.held else ()
        # On other GPUs torch's grouped product reads ``ends`` on the host.
        grouped = _grouped_mm is not None and all(weight.dtype == torch.bfloat16 and _aligned(weight, weight) for weight in weights)
        if weights and grouped and self.gate_up.is_cuda and torch.cuda.get_device_capability(self.gate_up.device) >= _GROUPED_CAPABILITY:
            return ""
        return "experts are multiplied one by one (quantised, not bfloat16, of odd sizes, or on a GPU without grouped products)"

    def _places(self, chosen: torch.Tensor) -> torch.Tensor:
        """The place on this rank of the expert's copy for each token; ``local experts`` if it is on another rank.

        Token ``i`` uses copy ``i`` mod the number of copies, on all ranks, so each pair is computed once.
        """
        if self._tables is None or self._tables[0].device != chosen.device:
            self._tables = self._make_tables(chosen.device)
        places, copies = self._tables
        if places.shape[1] == 1:
            return places[:, 0][chosen]
        token = torch.arange(chosen.shape[0], device=chosen.device)[:, None]
        return places[chosen, token % copies[chosen]]

    def _make_tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``[experts, most copies]``: the place of each copy here, and ``[experts]``: the number of copies."""
        local, copies = len(self.owners[self.rank]), replicas(self.owners, self.count)
        most = max(map(len, copies))
        rows = [[c.place if c.rank == self.rank else local for c in of] + [local] * (most - len(of)) for of in copies]
        return torch.tensor(rows, device=device), torch.tensor([len(of) for of in copies], device=device)


def _attribute(part: str) -> str:
    """The attribute of the weight that holds a part of an expert."""
    return "down" if part == "down" else "gate_up"


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Run ``g`` of the rows of ``x [rows, in]`` times ``weight[g]^T`` of ``weight [groups, out, in]``: ``[rows, out]``.

    ``ends[g]`` (int32) is where run ``g`` ends and the next one begins; rows after the last run are undefined.
    """
    if _grouped_mm is not None and _aligned(x, weight):
        out: torch.Tensor = _grouped_mm(x, weight.transpose(1, 2), offs=ends)
        return out
    # Odd sizes, float64, and builds without the kernel: one product for each run.
    return runs_linear(x, (partial(_same, matrix) for matrix in weight), weight.shape[1], ends)


def _same(matrix: torch.Tensor) -> torch.Tensor:
    return matrix


def runs_linear(x: torch.Tensor, matrices: Iterable[Callable[[], torch.Tensor]], out_size: int, ends: torch.Tensor) -> torch.Tensor:
    """The same with one product for each run; the matrix ``[out_size, in]`` of an empty run is not requested."""
    out, start = x.new_zeros(x.shape[0], out_size), 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if end > start:
            out[start:end] = F.linear(x[start:end], matrix())
        start = end
    return out


def _aligned(x: torch.Tensor, weight: torch.Tensor) -> bool:
    rows = (weight.shape[1] * weight.element_size(), weight.shape[2] * weight.element_size())
    return x.dtype in _GROUPED_DTYPES and all(size % _GROUPED_ALIGNMENT == 0 for size in rows)
